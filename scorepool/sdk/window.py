"""Run jobs within a window: at most so many at a time, in the order of their start."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable

from scorepool import wire


class Window:
    """The jobs of one call that are in flight. Belongs to one event loop."""

    def __init__(self, run: Callable[[wire.Request], Coroutine[object, object, wire.Job]], size: int) -> None:
        """`run` submits a job, returns it when it has ended, and cancels it if it is canceled itself."""
        if size < 1:
            raise ValueError(f"`max_in_flight` is {size}: expected 1 or more")
        self._run, self._size = run, size
        self._running: deque[asyncio.Task[wire.Job]] = deque()
        self._closing: asyncio.Task[None] | None = None

    @property
    def is_full(self) -> bool:
        return len(self._running) >= self._size

    @property
    def is_empty(self) -> bool:
        return not self._running

    async def start(self, request: wire.Request) -> None:
        """Start a job."""
        self._running.append(asyncio.create_task(self._run(request)))

    async def next(self) -> wire.Job:
        """Wait for the job that was started first, and take it out. Raises what `run` raises."""
        job = await self._running[0]
        self._running.popleft()
        return job

    async def close(self) -> None:
        """Cancel the jobs in flight. Again, it waits for the same: to cancel a task twice would interrupt its end."""
        self._closing = self._closing or asyncio.create_task(cancel_tasks(self._running))
        await asyncio.shield(self._closing)


async def cancel_tasks(tasks: Iterable[asyncio.Task[wire.Job]]) -> None:
    """Cancel tasks, wait for them, and drop their errors."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
