"""A submission is refused before its first write where a queue has a key of a wrong type."""

import pytest
from redis import Redis

from scorepool.store import Keys, RqKeys
from scorepool.store.scripts import load

JOB = ["j1", "demo", "", "fingerprint", b"request", b"kept", 100, 2, "status", "queued"]


def submit(redis: Redis, list_length: int) -> list[object]:
    answer: list[object] = redis.register_script(load("submit.lua"))(
        args=["alice", 100, list_length, 100, 1000, 0, 0, *JOB]
    )
    return answer


@pytest.mark.parametrize("list_length", [0, 1])
@pytest.mark.parametrize("key", [RqKeys.queue("demo"), RqKeys.registry("deferred", "demo"), Keys.fair_share("demo")])
def test_nothing_is_written(redis: Redis, key: str, list_length: int):
    redis.set(key, "wrong")

    assert submit(redis, list_length)[:2] == [b"wrong_type", key.encode()]

    assert redis.keys() == [key.encode()]


@pytest.mark.parametrize("list_length", [0, 1])
def test_nothing_is_written_if_the_backlog_that_a_job_would_join_is_no_list(redis: Redis, list_length: int):
    backlog = Keys.backlog("demo", "alice")
    redis.set(backlog, "wrong")
    redis.zadd(Keys.fair_share("demo"), {"bob": 1})

    assert submit(redis, list_length)[:2] == [b"wrong_type", backlog.encode()]

    assert not redis.exists(RqKeys.job("j1"), Keys.request("j1"), Keys.jobs_of("alice"))
