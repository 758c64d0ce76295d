"""Owners take turns at what only one task can do at a time."""

import asyncio

import pytest

from scorepool.api.http.turns import Turns

pytestmark = pytest.mark.anyio


async def run(turns: Turns, owner: str, order: list[str]) -> None:
    async with turns.turn(owner):
        order.append(owner)
        await asyncio.sleep(0)


async def test_an_owner_with_one_task_waits_for_one_of_another():
    turns, order = Turns(), list[str]()
    tasks = [asyncio.create_task(run(turns, owner, order)) for owner in ("alice", "alice", "alice", "alice", "bob")]
    await asyncio.gather(*tasks)
    assert order == ["alice", "alice", "bob", "alice", "alice"]


async def test_a_task_that_is_canceled_loses_no_turn():
    turns, order = Turns(), list[str]()
    owners = ["alice", "alice", "bob", "carol", "bob"]
    tasks = [asyncio.create_task(run(turns, owner, order)) for owner in owners]
    for _ in range(2):
        await asyncio.sleep(0)
        tasks[2].cancel()
        tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(order) == ["alice", "bob", "carol"]
    await run(turns, "dave", order)
    assert order[-1] == "dave"


async def test_an_error_in_a_turn_passes_it_on():
    turns = Turns()
    with pytest.raises(ZeroDivisionError):
        async with turns.turn("alice"):
            raise ZeroDivisionError
    await run(turns, "bob", [])
