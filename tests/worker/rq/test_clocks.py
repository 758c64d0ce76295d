"""Workers whose clocks are wrong by an hour: Redis's clock decides when a job starts, expires or is due."""

import time
from datetime import datetime, timedelta

import pytest
from redis import Redis
from rq import Retry

from scorepool import wire
from scorepool.worker import Queue
from scorepool.worker.rq.leases import GRACE_S
from tests.worker.conftest import Workers, failure, generate, outcome, status, submit, until

HOUR_S = 3600
wrong = pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S], ids=["ahead", "behind"])


@wrong
def test_a_job_expires_by_the_clock_of_redis_and_not_of_the_worker(redis: Redis, workers: Workers, ahead_s: int):
    late = submit(redis, generate(), fields={"expires_at": repr(time.time() - 0.01)})
    running = submit(redis, generate(max_tokens=100_000), fields={"expires_at": repr(time.time() + 2)})
    in_time = submit(redis, generate(), fields={"expires_at": repr(time.time() + 60)})

    workers.start("--burst", FAKE_CLOCK_AHEAD_S=str(ahead_s)).wait(timeout=60)

    assert failure(redis, late).code == failure(redis, running).code == "expired"
    assert isinstance(outcome(redis, in_time), wire.Result)


@wrong
def test_scheduled_jobs_run_when_they_are_due(redis: Redis, workers: Workers, ahead_s: int):
    """Check jobs scheduled by another process, and a retry scheduled by the worker itself."""
    queue = Queue("demo", connection=redis)
    soon, later = (queue.enqueue_in(timedelta(seconds=delay_s), "add", 1) for delay_s in (1, 600))
    flaky = queue.enqueue("flaky", retry=Retry(max=3, interval=[600]))

    workers.start("--with-scheduler", worker="FunctionsWorker", FAKE_CLOCK_AHEAD_S=str(ahead_s))
    until(lambda: soon.get_status() == "finished" and flaky.get_status() == "scheduled")

    assert later.get_status() == "scheduled"
    assert redis.zscore("rq:scheduled:demo", flaky.id) == pytest.approx(time.time() + 600, abs=300)


@wrong
def test_the_score_of_a_lease_is_out_of_reach_of_rqs_cleaners(redis: Redis, workers: Workers, ahead_s: int):
    """RQ's cleaners take entries scored below the current time and would use up a Retry of a running job."""
    running = submit(redis, generate(max_tokens=100_000))
    workers.start(FAKE_CLOCK_AHEAD_S=str(ahead_s))
    until(lambda: status(redis, running) == "started")
    claimed = redis.zscore("rq:wip:demo", redis.zrange("rq:wip:demo", 0, 0)[0])
    until(
        lambda: redis.zscore("rq:wip:demo", redis.zrange("rq:wip:demo", 0, 0)[0]) != claimed
    )  # a heartbeat extends the lease
    extended = redis.zscore("rq:wip:demo", redis.zrange("rq:wip:demo", 0, 0)[0])

    assert claimed == pytest.approx(time.time() + GRACE_S, abs=60)
    assert extended == pytest.approx(time.time() + GRACE_S, abs=60)


def test_a_job_starts_by_the_clock_of_redis_and_never_before_it_was_created(redis: Redis, workers: Workers):
    job_id = submit(redis, generate(), fields={"created": f"{time.time():.6f}"})

    workers.start("--burst", "--name", "mac", FAKE_CLOCK_AHEAD_S="-3600").wait(timeout=60)

    created, started, ended = redis.hmget(f"rq:job:{job_id}", "created", "started_at", "ended_at")
    started_at, ended_at = (datetime.fromisoformat(text.decode()).timestamp() for text in (started, ended))
    assert float(created) <= started_at + 0.001
    assert started_at <= ended_at < time.time() + 1
    assert 0 < float(redis.hget("rq:worker:mac", "total_working_time")) < 60
