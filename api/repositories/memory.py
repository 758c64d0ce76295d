"""Refuse what takes memory of Redis for long while too much of its `maxmemory` is in use. See store/lua/memory.lua."""

from scorepool import store
from scorepool.api.http.errors import RedisFull


def memory_is_short() -> RedisFull:
    """Build the error for new jobs and files that Redis has no room for."""
    return RedisFull(
        f"Redis uses more than {store.MEMORY_FOR_NEW} % of its memory (maxmemory), so no new jobs and files are "
        "accepted, and nothing of this request was; send it again later, or delete what you do not need"
    )
