"""Work on chunks of rows at the same time, and yield what is done in their order."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
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
                chunk = await asyncio.to_thread(next, chunks, None)
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
