"""Translate HTTP to calls of the parts in `api/state.py`, in one file per subject."""
