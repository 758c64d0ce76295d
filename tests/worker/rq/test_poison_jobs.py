"""Poison jobs: a job that kills its workers fails, and the jobs that ran beside it finish."""

import random
import signal
import time
from collections import Counter

import pytest
from redis import Redis

from scorepool import wire
from scorepool.worker.claims.leases import GRACE_S
from tests.worker.conftest import Workers, done, failure, generate, most_at_once, outcome, status, submit, until


def check_innocent(redis: Redis, ids: list[str]) -> None:
    assert [job_id for job_id in ids if not isinstance(outcome(redis, job_id), wire.Result)] == []
    assert {redis.hget(f"rq:job:{job_id}", "retries_left") for job_id in ids} == {b"3"}


@pytest.mark.parametrize("repetition", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 20))])
def test_a_job_that_kills_its_workers_fails_and_forty_others_finish(redis: Redis, workers: Workers, repetition: int):
    place = random.Random(repetition).randrange(41)
    ids = [
        submit(redis, generate("POISON" if i == place else "hello", max_tokens=5), webhook=i == place)
        for i in range(41)
    ]
    poison = ids.pop(place)

    deaths = 0
    while workers.start("--burst", SCOREPOOL_CRASH_LIMIT="3").wait(timeout=60) != 0:
        deaths += 1

    # Six deaths halve 41 jobs down to one, and three more happen while it runs alone. Jobs that end before the poison
    # kills let others begin beside it, so on a busy machine there are more.
    assert 3 <= deaths <= 60
    assert status(redis, poison) == "failed"
    assert failure(redis, poison) == wire.Failure(
        code="crashed", message="its worker died 3 times while it ran this job alone, so it is not tried again"
    )
    assert redis.lrange("rq:queue:webhooks", 0, -1) == [f"wh_{poison}".encode()]
    check_innocent(redis, ids)
    assert Counter(done(redis)) == Counter([*ids, poison])


def test_jobs_in_flight_when_workers_are_killed_from_outside_all_finish_and_run_together_again(
    redis: Redis, workers: Workers
):
    """Kill six workers with the same jobs in flight. That is more than the crash limit."""
    ids = [submit(redis, generate(max_tokens=200)) for _ in range(64)]  # each runs for a second if all run together
    for _ in range(6):
        worker = workers.start(SCOREPOOL_LEASE_S="30", SCOREPOOL_MAX_JOBS_IN_FLIGHT="6")  # so that some never are
        until(lambda: redis.zcard("rq:wip:demo"))
        time.sleep(0.1)
        worker.send_signal(signal.SIGKILL)
        worker.wait()

    workers.start("--burst", SCOREPOOL_LEASE_S="30", SCOREPOOL_MAX_JOBS_IN_FLIGHT="64").wait(timeout=60)

    check_innocent(redis, ids)
    assert most_at_once(redis, ids) > 16  # jobs that were not in flight at the last deaths run together


def test_a_burst_worker_with_late_heartbeats_at_its_start_reclaims_jobs_before_it_ends(redis: Redis, workers: Workers):
    """A worker reclaims jobs only while its heartbeats are on time, because other workers may have stalled as well."""
    orphan = submit(redis, generate())
    redis.lrem("rq:queue:demo", 1, orphan)
    redis.zadd("rq:wip:demo", {f"{orphan}:gone": time.time() + GRACE_S})

    assert workers.start("--burst", worker="LateHeartbeatWorker").wait(timeout=60) == 0

    assert isinstance(outcome(redis, orphan), wire.Result)
