"""Jobs end, each exactly once, through real `rq worker` processes."""

import signal

from redis import Redis

import wire
from tests.worker.conftest import Workers, done, failure, generate, outcome, status, submit, until


def test_two_hundred_jobs_end_once_each_with_32_in_flight(redis: Redis, workers: Workers):
    ids = [submit(redis, generate(max_tokens=1 + i % 20)) for i in range(200)]

    worker = workers.start("--burst", SCOREPOOL_MAX_JOBS_IN_FLIGHT="32")

    assert worker.wait(timeout=30) == 0
    assert sorted(done(redis)) == sorted(ids)
    assert all(isinstance(outcome(redis, job_id), wire.Result) for job_id in ids)
