"""Redis knows of every object that a worker writes, however long the write takes."""

import logging
from collections.abc import Callable
from itertools import chain, repeat
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis

from scorepool import store, wire
from scorepool.store.result_store import ResultStoreError
from scorepool.worker.rq.result_writer import ResultWriter
from tests.api.fake_worker import RESULT

LEASE = f"{'ab' * 16}:e1"


class SleepyStore:
    """A store for whose writes the machine sleeps until the API has forgotten the object. Some fail at their end."""

    def __init__(self, redis: Redis, num_failing: int) -> None:
        self.redis, self.num_failing = redis, num_failing

    def put(self, path: str, body: bytes) -> None:
        assert self.redis.zrange(store.Keys.stored_results, 0, -1) == [LEASE.encode()]
        self.redis.delete(store.Keys.stored_results)
        if self.num_failing:
            self.num_failing -= 1
            raise ResultStoreError("it does not answer")


@pytest.mark.parametrize("num_failing", [0, 1])
@pytest.mark.parametrize("loses_lease", [False, True])
def test_an_object_that_was_forgotten_during_its_write_is_expected_again(
    redis: Redis, num_failing: int, loses_lease: bool
):
    posted: SimpleQueue[Callable[[], object]] = SimpleQueue()
    held = chain([True], repeat(not loses_lease))
    objects: Any = SleepyStore(redis, num_failing)
    writer = ResultWriter(redis, objects, 1, posted.put, lambda _: next(held), logging.getLogger())
    job = SimpleNamespace(id="ab" * 16, outcome=wire.encode(RESULT))
    inflight: Any = SimpleNamespace(
        job=job, value=RESULT, error=None, lease_key=LEASE, execution=SimpleNamespace(id="e1"), is_being_stored=False
    )
    writer.take(inflight)
    posted.get(timeout=30)()
    assert not inflight.is_being_stored
    assert redis.zrange(store.Keys.stored_results, 0, -1) == [LEASE.encode()]
