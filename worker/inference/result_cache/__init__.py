"""Give what the same weights have computed before, instead of computing it again (docs/cache.md).

digest.py         which sequences may be given again, and what decides their numbers
entry.py          a computed sequence ──► wire.CachedSequence ──► the sequence that asks for the same
cache_store.py    entries in Redis, by a thread of its own
result_cache.py   sequences that run now, those that wait for them, and the way to the engine for the others
"""
