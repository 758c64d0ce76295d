"""Ask servers of which some may not answer, so that one that hangs does not hold up what is asked of all."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from redis.exceptions import TimeoutError as RedisTimeoutError

from scorepool import store
from scorepool.api.http import tasks
from scorepool.api.repositories.event_reader import EventReader

T = TypeVar("T")
SILENT_S = 0.25  # in which a server answers whose streams cannot be read


class Reach:
    """The servers of a deployment, and the readers that find out whether they answer.

    A reader asks its server all the time, so no other part needs to try out one that hangs.
    """

    def __init__(self, servers: store.ServerMap, readers: Sequence[EventReader]) -> None:
        self._servers = servers
        self._readers = readers

    def is_silent(self, index: int) -> bool:
        """True if a server is known not to answer, and others may."""
        return not self._servers.is_one and self._readers[index].is_silent

    async def ask(self, index: int, answer: Awaitable[T]) -> T:
        """Return the answer of a server. Raises RedisError, of one of several soon after it is known to be silent.

        The server may become so while the answer is waited for.
        """
        if self._servers.is_one:
            return await answer
        task = asyncio.ensure_future(answer)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=SILENT_S)
                if self.is_silent(index) and not task.done():
                    raise RedisTimeoutError(f"the Redis of {self._servers.servers[index].setting} does not answer")
            return task.result()
        finally:
            if not task.done():
                await tasks.cancel_and_wait([task])
