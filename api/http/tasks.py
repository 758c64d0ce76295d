"""Share the event loop: work in turns, and end tasks whose results are not needed."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
TURN_S = 0.005  # for which a request works before others have a turn


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items, and let others use the event loop after each TURN_S."""
    began = time.monotonic()
    for item in items:
        if time.monotonic() - began > TURN_S:
            await asyncio.sleep(0)
            began = time.monotonic()
        yield item


async def cancel_and_wait(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, wait until they have ended, and drop their exceptions.

    The cancellation is repeated, because in Python 3.11 redis-py loses one that arrives as it sends a command: its
    asyncio.wait_for drops it if the command has just been sent.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.1)
    await asyncio.gather(*tasks, return_exceptions=True)
