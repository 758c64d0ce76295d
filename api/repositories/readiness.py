"""Say whether jobs can be accepted: Redis takes writes, and the ends of jobs are read."""

import asyncio
from collections.abc import Sequence

from redis.asyncio import Redis
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from scorepool import store
from scorepool.api.http.errors import ApiError, Unavailable
from scorepool.api.repositories.event_reader import EventReader
from scorepool.api.repositories.queue import check_writable

PATIENCE_S = 1.0  # in which one of several servers answers, so that it does not hold up the jobs of the others


class Readiness:
    """The readiness of one API process. With several servers it is ready if one of them is."""

    def __init__(self, servers: store.ServerMap, redis: Sequence[Redis], readers: Sequence[EventReader]) -> None:
        self._servers = servers
        self._redis = redis
        self._readers = readers

    async def check(self) -> list[str]:
        """Return what cannot be used, a sentence for each server. Raises RedisError or Unavailable if nothing can."""
        found = await asyncio.gather(*map(self._check_one, self._redis, self._readers))
        errors = [error for error in found if error is not None]
        if len(errors) == len(found):
            raise errors[0]
        return [
            f"{_what(server)}: the Redis of {server.setting} does not answer"
            for server, error in zip(self._servers.servers, found, strict=True)
            if error is not None
        ]

    async def _check_one(self, redis: Redis, reader: EventReader) -> RedisError | ApiError | None:
        try:
            async with asyncio.timeout(None if self._servers.is_one else PATIENCE_S):
                await check_writable(redis)
        except RedisError as error:
            return error
        except TimeoutError:
            return RedisTimeoutError(f"no answer within {PATIENCE_S:g} s")
        return None if reader.is_alive else Unavailable("the stream of ended jobs is not being read")


def _what(server: store.MappedServer) -> str:
    """Name what is on a server."""
    if server.tag:
        return f"models {', '.join(server.models)}"
    return "models that SCOREPOOL_REDIS_URLS does not name, files and batches"
