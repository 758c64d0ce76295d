"""Tasks share the event loop, and canceled ones have ended when `cancel_and_wait` returns."""

import asyncio
import time

import pytest

from scorepool.api.http import tasks

pytestmark = pytest.mark.anyio


async def test_a_task_that_loses_a_cancellation_is_ended():
    async def lose_one() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)

    async def fail() -> None:
        raise RuntimeError("nobody awaits this")

    running = [asyncio.create_task(lose_one()), asyncio.create_task(fail())]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await tasks.cancel_and_wait(running)
    assert all(task.done() for task in running)


async def test_others_have_a_turn_between_items_that_take_long():
    num_turns = 0

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    async for _ in tasks.in_turns(range(5)):
        time.sleep(2 * tasks.TURN_S)  # noqa: ASYNC251
    await tasks.cancel_and_wait([running])
    assert num_turns >= 4
