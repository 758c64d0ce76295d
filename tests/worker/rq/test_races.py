"""Replies, messages and signals that are lost, come twice or late, or at a bad moment."""

import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from redis import Redis

from scorepool.store import JobField
from scorepool.worker import Queue
from scorepool.worker.claims.dead_workers import leases_of_dead
from scorepool.worker.claims.leases import Claim, Claimed
from scorepool.worker.rq.errors import Stopped
from scorepool.worker.rq.worker import Worker
from tests.fleet.link import Link
from tests.worker.conftest import Workers, done, generate, submit, until


def in_flight(redis: Redis) -> int:
    return redis.zcard("rq:wip:demo")


def kill(workers: Workers) -> None:
    workers.processes[-1].kill()
    workers.processes[-1].wait()


def test_a_lost_reply_puts_no_jobs_back(redis: Redis, redis_url: str, root: Path, tmp_path: Path):
    ids = [submit(redis, generate(max_tokens=500)) for _ in range(2)]
    with Link(redis_url) as link, Workers(link.url, root, tmp_path) as workers:
        workers.start(SCOREPOOL_LEASE_S="20")
        until(lambda: in_flight(redis) == 2)
        while "Redis is away" not in workers.log:
            link.lose_next_reply(lambda data: True, resets=True)
            until(link.lost_reply.is_set)
        until(lambda: len(done(redis)) == 2)

        assert sorted(done(redis)) == sorted(ids)
        assert "put back" not in workers.log


def test_a_burst_worker_stays_after_a_lost_reply(redis: Redis, redis_url: str, root: Path, tmp_path: Path):
    job_id = submit(redis, generate("MARK"))
    with Link(redis_url) as link, Workers(link.url, root, tmp_path) as workers:
        link.lose_next_reply(b"MARK", resets=True)

        assert workers.start("--burst", SCOREPOOL_LEASE_S="20").wait(timeout=60) == 0
        assert link.lost_reply.is_set()
        assert done(redis) == [job_id]


def test_a_death_counts_after_the_lease_of_its_job_has_expired(redis: Redis, workers: Workers):
    job_id = submit(redis, generate(max_tokens=100_000))
    workers.start()
    until(lambda: in_flight(redis) == 1)
    kill(workers)
    until(lambda: not redis.keys("rq:execution:*"))

    [held] = leases_of_dead(redis, [Queue("demo", connection=redis)], "other", 20.0, is_starting=False)

    assert [lease_key.partition(":")[0] for lease_key in held] == [job_id]


def test_a_death_counts_however_long_the_next_worker_loads_its_model(redis: Redis, workers: Workers):
    job_id = submit(redis, generate(max_tokens=100_000))
    workers.start(SCOREPOOL_LEASE_S="20")  # so that its registration outlives the start of a process
    until(lambda: in_flight(redis) == 1)
    kill(workers)

    workers.start(worker="EndlessStartWorker", SCOREPOOL_LEASE_S="20")
    until(lambda: in_flight(redis) == 0)

    assert redis.hget(f"rq:job:{job_id}", JobField.MAX_CONCURRENCY) == b"1"


def test_a_worker_whose_first_look_failed_does_not_take_its_own_jobs_for_those_of_a_predecessor(
    redis: Redis, redis_url: str, root: Path, tmp_path: Path
):
    job_id = submit(redis, generate(max_tokens=100_000))
    with Link(redis_url) as link, Workers(link.url, root, tmp_path) as workers:
        link.lose_next_reply(b"rq:worker:mac", resets=True)  # to the question which workers there are
        workers.start("--name", "mac", SCOREPOOL_LEASE_S="2")
        until(lambda: in_flight(redis) == 1)
        assert link.lost_reply.is_set()
        time.sleep(4)  # until it has looked again

        assert redis.hget(f"rq:job:{job_id}", JobField.MAX_CONCURRENCY) is None
        assert "took" not in workers.log


def test_a_worker_that_drains_does_not_spin(redis: Redis, workers: Workers):
    for _ in range(3):
        submit(redis, generate(max_tokens=1000))
    worker = workers.start(SCOREPOOL_MAX_JOBS_IN_FLIGHT="1", FAKE_STEP_S="0.01")
    until(lambda: ": begins generate demo" in workers.log)  # a job that arrives after the signal is put back
    worker.send_signal(signal.SIGTERM)
    until(
        lambda: "asked to stop: finishes 1 jobs for up to 50 s, then puts the rest back; a second signal" in workers.log
    )
    times = psutil.Process(worker.pid).cpu_times

    before, began_at = times(), time.monotonic()
    time.sleep(2)
    after = times()

    assert after.user + after.system - before.user - before.system < 0.4 * (time.monotonic() - began_at)


def test_a_stop_command_may_overtake_the_reply_that_brings_its_job(redis: Redis, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SCOREPOOL_MODEL", "demo=fake")
    job_id = submit(redis, generate())
    worker = Worker(["demo"], connection=redis)
    claimed = worker.leases.claim(worker.queues, Claim(max_jobs=1, num_in_flight=0, max_in_flight=1))

    worker._is_claiming = True
    worker._stop_job(job_id)
    worker._take_claimed(claimed)

    [inflight] = worker.in_flight.values()
    assert isinstance(inflight.error, Stopped)

    worker._stop_job("another")
    assert list(worker._early_stops) == ["another"]
    worker._take_claimed(Claimed([]))
    assert not worker._early_stops  # a job of that id that is queued later runs


def test_a_job_whose_recorded_end_is_lost_with_its_master_goes_back_to_its_queue(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SCOREPOOL_MODEL", "demo=fake")
    job_id = submit(redis, generate())
    worker = Worker(["demo"], connection=redis)
    claim = Claim(max_jobs=1, num_in_flight=0, max_in_flight=1)
    [held] = worker.leases.claim(worker.queues, claim).jobs
    worker._recorded_leases.append(held.lease_key)

    worker._take_claimed(worker.leases.claim(worker.queues, replace(claim, max_jobs=0, known=())))
    assert worker.link.wait(10.0)

    assert not worker.in_flight
    assert in_flight(redis) == 0
    assert redis.lrange("rq:queue:demo", 0, -1) == [job_id.encode()]
    worker._take_claimed(Claimed([held]))  # a late reply
    assert worker.link.wait(10.0)
    assert redis.lrange("rq:queue:demo", 0, -1) == [job_id.encode()]
