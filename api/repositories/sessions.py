"""Keep who is logged in to the page: a random token per browser, which stands for an API key while that key is valid.

Redis holds the tokens' hashes and no keys. A name has at most MAX_SESSIONS; the oldest go first.
"""

import hashlib
import re
import secrets
from typing import Any

from msgspec import Struct
from redis.asyncio import Redis

from scorepool import store, wire
from scorepool.api.repositories import decode

SESSION_S = 7 * 86_400
MAX_SESSIONS = 50
_OWNER = re.compile(store.KEY_NAME)


class Session(Struct, frozen=True):
    """A login."""

    key_digest: bytes  # of the API key
    expires_at: float  # unix, s


class Sessions:
    """The sessions of all owners."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def create(self, owner: str, key_digest: bytes) -> str:
        """Begin a session. Return what its browser keeps."""
        token = secrets.token_urlsafe(32)
        now = await decode.now_s(self._redis)
        key = store.Keys.sessions_of(owner)
        found: Any = await self._redis.hgetall(key)
        ends = {
            name: each.expires_at if (each := decode.message(value, Session)) else 0.0 for name, value in found.items()
        }
        oldest_first = sorted(ends, key=lambda name: ends[name])
        num_gone = max(sum(end <= now for end in ends.values()), len(ends) + 1 - MAX_SESSIONS)
        async with self._redis.pipeline() as pipeline:
            if num_gone > 0:
                pipeline.hdel(key, *oldest_first[:num_gone])
            pipeline.hset(key, _hash(token), wire.encode(Session(key_digest, now + SESSION_S)))
            pipeline.expire(key, SESSION_S)
            await pipeline.execute()
        return f"{owner}.{token}"

    async def read(self, value: str) -> tuple[str, Session] | None:
        """Return the owner and the session of a browser, None if there is none."""
        owner, _, token = value.rpartition(".")
        if not _OWNER.fullmatch(owner):
            return None
        found: Any = await self._redis.hget(store.Keys.sessions_of(owner), _hash(token))
        session = decode.message(found, Session) if found else None
        if session is None or session.expires_at <= await decode.now_s(self._redis):
            return None
        return owner, session

    async def end(self, value: str) -> None:
        """End a session."""
        owner, _, token = value.rpartition(".")
        if _OWNER.fullmatch(owner):
            await self._redis.hdel(store.Keys.sessions_of(owner), _hash(token))


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
