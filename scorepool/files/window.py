"""Work on chunks of rows at the same time, and yield what is done in their order."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TypeVar

from scorepool.files.rows import Row

T = TypeVar("T")
MAX_JOB_SIZE = 4 * 2**20  # characters and token ids of the rows of one chunk: a server takes 32 MiB by default


def chunk_rows(rows: Iterable[Row], max_rows: int) -> Iterator[list[Row]]:
    """Yield lists of rows. A list depends on its first row alone, not on where the work began."""
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += _size(row)
        if len(chunk) == max_rows or size >= MAX_JOB_SIZE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _size(row: Row) -> int:
    return sum(len(value) for value in (row.values or {}).values() if isinstance(value, str | list))


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Return what a function returns. The process may end while it runs, unlike with `asyncio.to_thread`.

    So Ctrl-C stops a command that waits for a pipe in which nothing comes.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def end(set_outcome: Callable[[], None]) -> None:
        if not future.done():
            set_outcome()

    def run() -> None:
        try:
            outcome = partial(future.set_result, function())
        except Exception as error:
            outcome = partial(future.set_exception, error)
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(end, outcome)

    threading.Thread(target=run, name="scorepool-input", daemon=True).start()
    return await future


async def in_order(
    chunks: Iterator[list[Row]], work: Callable[[list[Row]], Coroutine[object, object, T]], max_in_flight: int
) -> AsyncGenerator[T]:
    """Yield the results of `work` in the order of the chunks, with at most `max_in_flight` at a time.

    Input is read in a thread, because a pipe may be slow. When this ends early, the work in flight is canceled.
    """
    running: deque[asyncio.Task[T]] = deque()
    is_read = False
    try:
        while True:
            while not is_read and len(running) < max_in_flight:
                chunk = await in_daemon_thread(partial(next, chunks, None))
                if chunk is None:
                    is_read = True
                else:
                    running.append(asyncio.create_task(work(chunk)))
            if not running:
                return
            yield await running[0]
            running.popleft()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
