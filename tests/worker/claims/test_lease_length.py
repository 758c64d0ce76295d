"""A lease lasts as long as it is set on a good link, and longer where heartbeats are answered late or fail."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis
from redis.exceptions import TimeoutError as RedisTimeoutError

from scorepool.worker.claims.lease_length import MAX_FACTOR, NUM_BEATS, LeaseLength
from scorepool.worker.rq import job_holder
from scorepool.worker.rq.worker import Worker


def beat(length: LeaseLength, *seconds: float, at: float = 0.0) -> None:
    for answer_s in seconds:
        length.begin(at)
        length.end(at + answer_s)


def test_a_lease_lasts_as_long_as_it_is_set_while_heartbeats_are_answered_soon():
    length = LeaseLength(20.0)
    assert length.seconds == 20.0
    beat(length, 0.001, 0.5, 2.0)
    assert length.seconds == 20.0


def test_a_lease_outlasts_three_heartbeats_as_slow_as_the_slowest():
    length = LeaseLength(20.0)
    beat(length, 6.0)
    assert length.seconds == 30.0  # three times: 4 s between heartbeats, and 6 s for one
    beat(length, *[0.01] * (NUM_BEATS - 1))
    assert length.seconds == 30.0
    beat(length, 0.01)
    assert length.seconds == 20.0


def test_a_heartbeat_that_fails_takes_until_one_is_answered():
    length = LeaseLength(20.0)
    length.begin(100.0)  # fails
    length.begin(110.0)
    assert length.seconds == 42.0  # the one that repeats it asks for the longer lease already
    length.end(111.0)
    assert length.seconds == 45.0


def test_a_lease_lasts_three_times_as_long_at_most():
    length = LeaseLength(20.0)
    beat(length, 600.0)
    assert length.seconds == 60.0


@given(setting_s=st.floats(0.1, 1000), answers=st.lists(st.floats(0, 1e4), max_size=40))
def test_a_lease_is_never_shorter_than_it_is_set_nor_without_end(setting_s: float, answers: list[float]):
    length = LeaseLength(setting_s)
    beat(length, *answers)
    assert setting_s <= length.seconds <= MAX_FACTOR * setting_s


def test_heartbeats_that_are_slow_or_fail_lengthen_what_a_worker_claims(redis: Redis, monkeypatch: pytest.MonkeyPatch):
    clock = itertools.count(0.0, 2.0)  # two seconds at each look
    monkeypatch.setattr(job_holder, "awake_s", lambda: next(clock))
    worker = Worker(["demo"], connection=redis)
    worker.register_birth()
    worker.heartbeat_clock.record()
    with monkeypatch.context() as patched:
        patched.setattr(worker, "register", timeout)
        for _ in range(2):
            with pytest.raises(RedisTimeoutError):
                worker._send_heartbeat()
    worker._send_heartbeat()

    seconds = worker.leases.length.seconds
    assert seconds == 30.0  # 3 x (4 + 6)
    assert worker.leases.lease_ms == 30_000
    assert 3 * 20 < redis.ttl(worker.key) <= 3 * 30


def timeout(pipeline: object) -> None:
    raise RedisTimeoutError
