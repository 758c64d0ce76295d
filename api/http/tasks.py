"""Tasks of asyncio that nobody waits for any more."""

import asyncio
from collections.abc import Collection
from typing import Any


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel these, wait until they are gone, and forget what they raised.

    Once is not enough: redis-py loses a cancellation that meets it while it connects, and the task waits on.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.1)
    await asyncio.gather(*tasks, return_exceptions=True)
