"""A background loop whose every turn fails at once leaves the event loop free: requests and signals are handled."""

import asyncio
from typing import Any

import pytest

from scorepool.api.batches.batch_lease import BatchLease
from scorepool.api.batches.driver import Driver
from scorepool.api.repositories.event_reader import EventReader
from scorepool.api.repositories.waiting import Waiting

pytestmark = pytest.mark.anyio
TURNS = 200  # of the event loop


class Failing:
    """Stand for Redis and for the services: everything fails before anything is awaited."""

    num_calls = 0

    def __getattr__(self, name: str) -> Any:
        type(self).num_calls += 1
        if type(self).num_calls > TURNS:
            pytest.fail("the loop does not pause")
        raise TypeError(name)

    async def aclose(self) -> None:
        """Close nothing."""


async def test_the_driver_of_batches_pauses_after_any_error(monkeypatch: pytest.MonkeyPatch):
    num_claims = 0

    async def claim(*_: object) -> None:
        nonlocal num_claims
        num_claims += 1
        if num_claims > TURNS:
            pytest.fail("the loop does not pause")
        raise TypeError("a bad option")

    monkeypatch.setattr(BatchLease, "claim", claim)
    services: Any = type("Services", (), {"redis": None, "settings": type("Settings", (), {"lease_s": 1.0})})
    driver = Driver(services)
    driver.start()
    for _ in range(TURNS):
        await asyncio.sleep(0)
    await driver.close()
    assert num_claims == 1


async def test_the_reader_of_ended_jobs_pauses_after_any_error_and_goes_on():
    redis: Any = Failing()
    waiting = Waiting([reader := EventReader(redis, redis)], on_ended=lambda _: None)
    waiting.start()
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert Failing.num_calls < 5
    assert not waiting.is_alive
    assert reader._task is not None
    assert not reader._task.done()
    await waiting.close()
