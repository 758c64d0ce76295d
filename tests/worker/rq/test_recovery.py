"""The time until the jobs of a dead worker run again, with the default lease."""

import time

import pytest
from redis import Redis

from scorepool.store import JobField
from tests.worker.conftest import Workers, generate, status, submit, until

DEFAULT_LEASE_S = "20"
ENDLESS_S = "3600"  # a lease that does not expire during a test


def kill_with_jobs_in_flight(redis: Redis, workers: Workers, *options: str) -> list[str]:
    ids = [submit(redis, generate(max_tokens=100_000)) for _ in range(8)]
    worker = workers.start(*options, SCOREPOOL_LEASE_S=ENDLESS_S)
    until(lambda: redis.zcard("rq:wip:demo") == 8)
    worker.kill()
    worker.wait()
    return ids


@pytest.mark.parametrize("options", [("--name", "mac"), ()])
@pytest.mark.parametrize("limit_s", [60.0, pytest.param(2.0, marks=pytest.mark.soak)])
def test_jobs_run_again_on_the_same_host_without_waiting_for_their_leases(
    redis: Redis, workers: Workers, options: tuple[str, ...], limit_s: float
):
    """Check the delay after the next worker has started. The limit is two seconds on an idle machine."""
    ids = kill_with_jobs_in_flight(redis, workers, *options)
    redis.delete("scorepool:models")

    workers.start(*options, SCOREPOOL_LEASE_S=DEFAULT_LEASE_S)
    until(lambda: redis.zcard("scorepool:models"))  # the worker is up: its engine has loaded
    up_at = time.monotonic()

    until(
        lambda: any(redis.hget(f"rq:job:{job_id}", JobField.MAX_CONCURRENCY) for job_id in ids)
    )  # a job was reclaimed
    until(lambda: any(status(redis, job_id) == "started" for job_id in ids))
    print(f"running again {time.monotonic() - up_at:.2f} s after the worker was up")
    assert time.monotonic() - up_at < limit_s


@pytest.mark.soak
def test_jobs_run_again_on_another_host_within_thirty_seconds(redis: Redis, workers: Workers):
    other = workers.start("--name", "other", SCOREPOOL_LEASE_S=DEFAULT_LEASE_S)
    until(lambda: redis.zcard("scorepool:models"))
    first = submit(redis, generate(max_tokens=100_000))
    until(lambda: redis.zcard("rq:wip:demo") == 1)
    redis.hset("rq:worker:other", "machine", "another")
    other.kill()
    other.wait()
    died_at = time.monotonic()

    workers.start(SCOREPOOL_LEASE_S=DEFAULT_LEASE_S)

    until(lambda: redis.hget(f"rq:job:{first}", JobField.MAX_CONCURRENCY), timeout_s=30)
    until(lambda: status(redis, first) == "started")
    print(f"running again after {time.monotonic() - died_at:.1f} s")
    assert time.monotonic() - died_at < 30
