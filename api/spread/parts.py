"""Find the server of a job."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from redis.exceptions import RedisError

from scorepool.api.http.errors import NotFound
from scorepool.api.repositories.reach import Reach
from scorepool.store import ServerMap

T = TypeVar("T")
R = TypeVar("R")


class Parts(Generic[T]):
    """The repositories of one kind, one for each server, in the order of the map."""

    def __init__(self, servers: ServerMap, parts: Sequence[T], reach: Reach) -> None:
        self.servers = servers
        self.all = parts
        self._reach = reach

    async def on(self, index: int, act: Callable[[T], Awaitable[R]]) -> R:
        """Act on one server. Raises RedisError, soon if it is known not to answer."""
        return await self._reach.ask(index, act(self.all[index]))

    async def on_all(self, act: Callable[[T], Awaitable[R]]) -> list[R]:
        """Act on all servers at once. Raises the error of any."""
        return await asyncio.gather(*(self.on(index, act) for index in range(len(self.all))))

    async def find(self, job_id: str, act: Callable[[T], Awaitable[R]]) -> R:
        """Act on the server that a job's id names, then on the others, until one has the job.

        Raises NotFound, or, because a server that does not answer may have the job, RedisError.
        """
        absent: NotFound | None = None
        failed: RedisError | OSError | None = None
        for index in self.servers.search_order(job_id):
            try:
                return await self.on(index, act)
            except NotFound as error:
                absent = absent or error
            except (RedisError, OSError) as error:
                failed = failed or error
        if failed is not None:
            raise failed
        assert absent is not None
        raise absent
