"""Canceled tasks have ended when `cancel_and_wait` returns."""

import asyncio

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
