"""Let several owners take turns at what only one can do at a time."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Turns:
    """One task at a time has the turn. Owners have it in rotation, the tasks of one owner in order of arrival."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the owner that is next first

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncGenerator[None]:
        """Wait for the turn, and keep it until the context ends."""
        if self._is_taken:
            given = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(owner, deque()).append(given)
            try:
                await given
            except asyncio.CancelledError:
                if not given.cancelled():  # it was given just before
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            owner = next(iter(self._waiting))
            waiting = self._waiting.pop(owner)
            given = waiting.popleft()
            if waiting:
                self._waiting[owner] = waiting  # behind the others
            if not given.done():  # its task was not canceled
                given.set_result(None)
                return
        self._is_taken = False
