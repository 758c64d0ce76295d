"""Read something once for all who ask at the same time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from scorepool.api.http import tasks
from scorepool.store.clock import clock_s

T = TypeVar("T")


class SharedRead(Generic[T]):
    """Run a read at most once at a time, however many ask for it, and use what it found again."""

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._task: asyncio.Task[T] | None = None
        self._began_at = float("-inf")  # clock_s(), of the last read

    async def since(self, at: float) -> T:
        """Return what a read found that began at `at` (clock_s()) or later. Raises what the read raised.

        All who wait for a read share its failure. The next one to ask starts another.
        """
        while self._task is None or self._began_at < at or _has_failed(self._task):
            if self._task is None or self._task.done():
                self._began_at = clock_s()
                self._task = asyncio.create_task(self._run())
                self._task.add_done_callback(_has_failed)
                break
            await asyncio.wait([self._task])  # it began too early
        return await asyncio.shield(self._task)

    async def close(self) -> None:
        """End a read that is under way."""
        if self._task is not None:
            await tasks.cancel_and_wait([self._task])

    async def _run(self) -> T:
        return await self._read()


def _has_failed(task: asyncio.Task[object]) -> bool:
    """True if the read has ended without a value. Asking for its exception keeps asyncio from logging it."""
    return task.done() and (task.cancelled() or task.exception() is not None)
