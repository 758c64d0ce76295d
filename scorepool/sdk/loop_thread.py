"""Run coroutines on an event loop in a thread of its own, for callers that block."""

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

T = TypeVar("T")
STOP_S = 10.0  # in which the loop's tasks end when the interpreter exits


class LoopThread:
    """An event loop in a daemon thread. It stops when it is closed, when nobody refers to it, and at the exit."""

    def __init__(self, on_stop: Callable[[], Awaitable[None]]) -> None:
        """Start the thread. `on_stop` runs on the loop when the loop stops; it must not refer to this object."""
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = runner.get_loop()
        self._thread = threading.Thread(target=_serve, args=(runner, on_stop), name="scorepool-client", daemon=True)
        self._process_id = os.getpid()
        self._thread.start()
        self._stop = weakref.finalize(self, _stop, self._loop, self._thread, self._process_id)

    def close(self) -> None:
        """Cancel what runs on the loop, and end the thread."""
        self._stop()

    @property
    def can_run(self) -> bool:
        """True if `run` is possible here and now."""
        return self._obstacle() is None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. An interrupt cancels it, and waits until it has ended.

        Raises RuntimeError where it would never end: after `close`, after a fork, on the loop's own thread.
        """
        if obstacle := self._obstacle():
            work.close()
            raise RuntimeError(obstacle)
        tasks: list[asyncio.Task[Any]] = []

        async def run_as_task() -> T:
            tasks.append(asyncio.tasks.current_task())  # type: ignore[arg-type]
            return await work

        async def cancel() -> None:
            tasks[0].cancel()
            await asyncio.wait(tasks)

        future = asyncio.run_coroutine_threadsafe(run_as_task(), self._loop)
        try:
            return future.result()
        except CancelledError:
            work.close()  # it may have been canceled before it began
            raise RuntimeError("the client was closed during this call") from None
        except BaseException:
            if not future.done():  # the task began before `cancel` does, because the loop runs what is first first
                asyncio.run_coroutine_threadsafe(cancel(), self._loop).result()
            raise

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that ends something. A loop that has stopped has ended it.

        A garbage collection may call this on the loop's own thread, where the coroutine can only run later.
        """
        if threading.current_thread() is self._thread:
            asyncio.run_coroutine_threadsafe(work, self._loop)
        elif self.can_run:
            self.run(work)
        else:
            work.close()

    def _obstacle(self) -> str | None:
        if os.getpid() != self._process_id:
            return "this client was made before a fork, in another process: make a new one here"
        if threading.current_thread() is self._thread:
            return "this is the client's own thread, which would wait for itself: call the client from another"
        if not self._stop.alive:
            return "this client is closed: make a new one"
        return None


def _serve(runner: asyncio.Runner, on_stop: Callable[[], Awaitable[None]]) -> None:
    with runner:
        loop = runner.get_loop()
        loop.run_forever()
        for task in (tasks := asyncio.all_tasks(loop)):
            task.cancel()
        loop.run_until_complete(_end(tasks, on_stop))


async def _end(tasks: set[asyncio.Task[Any]], on_stop: Callable[[], Awaitable[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
    await on_stop()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, process_id: int) -> None:
    if os.getpid() != process_id:  # the loop belongs to the process that was forked
        return
    loop.call_soon_threadsafe(loop.stop)
    if threading.current_thread() is not thread:  # a garbage collection may happen there
        thread.join(STOP_S)
