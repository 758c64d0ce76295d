"""A job that kills its workers is found and failed; nobody else is, whoever else kills workers."""

import random
import signal
import time
from collections import Counter

import pytest
from redis import Redis

from scorepool import wire
from scorepool.worker.rq.leases import GRACE_S
from tests.worker.conftest import Workers, done, failure, generate, most_at_once, outcome, status, submit, until


def check_innocent(redis: Redis, ids: list[str]) -> None:
    assert [job_id for job_id in ids if not isinstance(outcome(redis, job_id), wire.Result)] == []
    assert {redis.hget(f"rq:job:{job_id}", "retries_left") for job_id in ids} == {b"3"}


@pytest.mark.parametrize("repetition", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 20))])
def test_a_job_that_kills_its_workers_is_failed_and_forty_innocents_finish(
    redis: Redis, workers: Workers, repetition: int
):
    place = random.Random(repetition).randrange(41)
    ids = [
        submit(redis, generate("POISON" if i == place else "hello", max_tokens=5), webhook=i == place)
        for i in range(41)
    ]
    poison = ids.pop(place)

    deaths = 0
    while workers.start("--burst", SCOREPOOL_CRASH_LIMIT="3").wait(timeout=60) != 0:
        deaths += 1

    assert deaths <= 9  # halved from 41 to alone: six; then three alone
    assert status(redis, poison) == "failed"
    assert failure(redis, poison) == wire.Failure(
        code="crashed", message="its worker died 3 times while it ran this job alone, so it is not tried again"
    )
    assert redis.lrange("rq:queue:webhooks", 0, -1) == [f"wh_{poison}".encode()]
    check_innocent(redis, ids)
    assert Counter(done(redis)) == Counter([*ids, poison])


def test_jobs_that_stand_by_at_many_deaths_from_outside_all_finish_and_go_on_side_by_side(
    redis: Redis, workers: Workers
):
    """Six kills at which the same jobs are in flight: more than the limit."""
    ids = [submit(redis, generate(max_tokens=200)) for _ in range(64)]  # a second each, side by side
    for _ in range(6):
        worker = workers.start(SCOREPOOL_LEASE_S="30", SCOREPOOL_MAX_JOBS_IN_FLIGHT="64")
        until(lambda: redis.zcard("rq:wip:demo"))
        time.sleep(0.1)
        worker.send_signal(signal.SIGKILL)
        worker.wait()

    workers.start("--burst", SCOREPOOL_LEASE_S="30", SCOREPOOL_MAX_JOBS_IN_FLIGHT="64").wait(timeout=60)

    check_innocent(redis, ids)
    assert most_at_once(redis, ids) > 16  # those that were not in flight at the last deaths


def test_a_burst_worker_that_falters_at_its_start_takes_jobs_back_before_it_ends(redis: Redis, workers: Workers):
    """It takes nothing back until beats come in time: others may have stood still as it did."""
    orphan = submit(redis, generate())
    redis.lrem("rq:queue:demo", 1, orphan)
    redis.zadd("rq:wip:demo", {f"{orphan}:gone": time.time() + GRACE_S})

    assert workers.start("--burst", worker="FalteringWorker").wait(timeout=60) == 0

    assert isinstance(outcome(redis, orphan), wire.Result)
