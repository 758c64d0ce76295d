"""The writer of the history ends when it is told to."""

import asyncio
from typing import Any

import pytest

from scorepool.api.metrics.history import History

pytestmark = pytest.mark.anyio


class LosesOneCancellation:
    """Answer TIME as redis-py does while it connects."""

    async def time(self) -> tuple[int, int]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)
        return 0, 0


async def test_it_ends_though_a_cancellation_is_lost():
    unused: Any = None
    redis: Any = LosesOneCancellation()
    history = History(redis, unused, unused)
    history.start()
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await history.close()
    assert history._task is not None
    assert history._task.done()
