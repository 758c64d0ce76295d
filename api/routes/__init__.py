"""One file a subject; each translates HTTP into calls of the parts in `api/state.py`."""
