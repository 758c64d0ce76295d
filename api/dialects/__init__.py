"""Speak HTTP APIs of other servers (dialects), by pure translations to wire requests and from wire results.

To add a dialect:

1. Make a folder here. For each route write an `Endpoint` (see protocol.py): its path and types, `to_requests` and
   `to_reply`, and `to_events` if it streams.
2. List the endpoints in a `Dialect` in the folder's `__init__.py`.
3. Add the dialect to DIALECTS in api/app.py.

The routes, their OpenAPI entries, waiting, streaming and the renaming of fields in errors follow from that. deltas.py,
detokenizer.py, fields.py and unsupported.py hold what several dialects share.
"""
