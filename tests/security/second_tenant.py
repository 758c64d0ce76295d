"""Measure what a second tenant gets while the first one attacks: its small requests that are answered meanwhile."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from scorepool.api.http import tasks
from tests.api.conftest import BOB, bearer

PAUSE_S = 0.002  # between two requests of the second tenant


class Progress:
    """Count the answers of the second tenant, and measure the longest turn of the event loop in CPU time."""

    def __init__(self) -> None:
        self.answered = 0
        self.longest_turn_s = 0.0


@asynccontextmanager
async def second_tenant(http: httpx.AsyncClient) -> AsyncIterator[Progress]:
    """Send small requests as Bob, one after the other, until the context ends.

    Turns are measured in CPU time of the loop's thread, so that a loaded machine does not make them longer.
    """
    progress = Progress()

    async def ask() -> None:
        while True:
            reply = await http.get("/v1/models", headers=bearer(BOB))
            assert reply.status_code == 200
            progress.answered += 1
            await asyncio.sleep(PAUSE_S)

    async def watch() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(PAUSE_S)
            progress.longest_turn_s = max(progress.longest_turn_s, time.thread_time() - before)

    gc.freeze()  # a collection during the attack looks at what the attack made, not at all of the tests' modules
    watching = [asyncio.create_task(ask()), asyncio.create_task(watch())]
    try:
        yield progress
        for task in watching:
            assert not task.done(), task.exception()
    finally:
        await tasks.cancel_and_wait(watching)
