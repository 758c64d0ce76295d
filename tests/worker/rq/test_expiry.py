"""Expiry of jobs, and the sweep of ids that expired jobs leave in lists and registries."""

import asyncio
import itertools
import signal
import time

import pytest
import redis.asyncio
from redis import Redis

from scorepool import store, wire
from scorepool.api.http.large_replies import own_results
from scorepool.api.repositories.jobs import Jobs
from scorepool.api.repositories.stored_results import StoredResults
from scorepool.store import Keys, RqKeys
from scorepool.store.scripts import load
from scorepool.worker import Queue
from scorepool.worker.claims.leases import Claim, ClaimedJob, Leases
from scorepool.worker.rq import sweep
from scorepool.worker.rq.sweep import Sweep
from tests.worker.conftest import Workers, done, failure, generate, outcome, submit, until

PERMANENT = {RqKeys.queues, Keys.outcome_counts, store.DONE}  # see docs/operations.md


def read(redis_url: str, job_id: str) -> wire.Job:
    """Read a job of alice as the API does."""

    async def run() -> wire.Job:
        async with redis.asyncio.Redis.from_url(redis_url) as connection:
            with own_results("alice") as held:
                return await Jobs(connection, StoredResults(connection, None)).read("alice", job_id, held)

    return asyncio.run(run())


def test_a_job_that_expired_in_its_queue_is_failed_while_a_worker_holds_it(
    redis: Redis, redis_url: str, workers: Workers
):
    fields = {"owner": "alice", "created": "1.0", "expires_at": repr(time.time() - 1)}
    job_id = submit(redis, generate(), fields=fields)
    assert read(redis_url, job_id).status == "failed"

    workers.start(worker="HangingWorker")  # it hangs before it records the end
    until(lambda: redis.zcard(RqKeys.registry("wip", "demo")))

    shown = read(redis_url, job_id)
    assert (shown.status, shown.failure and shown.failure.code, shown.started_at) == ("failed", "expired", None)


def test_a_job_that_expired_in_its_queue_ends_once_if_it_is_canceled_while_a_silent_worker_holds_it(redis: Redis):
    fields = {"owner": "alice", "created": "1.0", "expires_at": repr(time.time() - 1)}
    job_id = submit(redis, generate(), fields=fields)
    queue, leases = Queue("demo", connection=redis), Leases(redis, "mac", "rq:worker:mac", 60.0)
    claim = Claim(max_jobs=1, num_in_flight=0, max_in_flight=1)
    [row] = leases.claim([queue], claim).jobs

    canceled, expired = (wire.encode(wire.Failure(code=code, message="")) for code in ("canceled", "expired"))
    answer = redis.eval(load("cancel.lua"), 0, job_id, "alice", canceled, 3600, expired)
    assert answer == [b"ended", b"failed"]

    redis.delete(RqKeys.execution(row.lease_key))  # the lease is over
    assert leases.reclaim([queue], 5) == (0, [])
    assert leases.claim([queue], claim).jobs == []
    assert redis.hget(RqKeys.job(job_id), "status") == b"failed"
    assert redis.hgetall(Keys.outcome_counts) == {b"expired": b"1"}
    assert not redis.exists(RqKeys.registry("wip", "demo"), RqKeys.executions(job_id))


def test_a_job_without_an_expiry_whose_worker_is_gone_is_canceled_at_once(redis: Redis):
    job_id = submit(redis, generate(), fields={"owner": "alice", "created": "1.0"})
    queue, leases = Queue("demo", connection=redis), Leases(redis, "mac", "rq:worker:mac", 60.0)
    claim = Claim(max_jobs=1, num_in_flight=0, max_in_flight=1)
    [row] = leases.claim([queue], claim).jobs
    canceled = wire.encode(wire.Failure(code="canceled", message=""))
    cancel = [load("cancel.lua"), 0, job_id, "alice", canceled, 3600, b""]
    assert redis.eval(*cancel) == [b"asked"]

    redis.delete(RqKeys.execution(row.lease_key))  # the lease is over

    assert redis.eval(*cancel) == [b"canceled"]
    assert failure(redis, job_id).code == "canceled"
    assert leases.extend([row])[0] == {row.lease_key}  # the worker was only late
    assert leases.check_leases([row]) == [(False, False)]
    assert leases.reclaim([queue], 5) == (0, [])
    assert leases.claim([queue], claim).jobs == []
    assert redis.eval(load("delete.lua"), 0, job_id, "alice") == [b"deleted"]


def leave_behind(redis: Redis, leases: Leases, **fields: str) -> ClaimedJob:
    """Let a worker claim a job and be gone, so that its lease ends, and let the job's `expires_at` pass."""
    job_id = submit(redis, generate(), fields={"owner": "alice", "created": "1.0"})
    claim = Claim(max_jobs=1, num_in_flight=0, max_in_flight=1)
    [row] = leases.claim([Queue("demo", connection=redis)], claim).jobs
    redis.hset(RqKeys.job(job_id), mapping={"expires_at": repr(time.time() - 1), **fields})
    redis.delete(RqKeys.execution(row.lease_key))
    return row


def test_a_job_that_expired_with_its_lease_cannot_be_ended_by_the_worker_that_held_it(redis: Redis, redis_url: str):
    leases = Leases(redis, "mac", "rq:worker:mac", 60.0)
    row = leave_behind(redis, leases)
    assert read(redis_url, row.job_id).status == "failed"

    assert leases.check_leases([row]) == [(False, False)]
    assert leases.extend([row]) == ({row.lease_key}, set())
    assert read(redis_url, row.job_id).status == "failed"

    assert leases.reclaim([row.queue], 5) == (1, [])
    leases.claim([row.queue], Claim(max_jobs=1, num_in_flight=0, max_in_flight=1))
    assert read(redis_url, row.job_id).status == "failed"


@pytest.mark.parametrize("is_a_day_ago", [False, True])
def test_a_job_that_expired_with_its_lease_ends_once_if_it_is_canceled(redis: Redis, is_a_day_ago: bool):
    leases = Leases(redis, "mac", "rq:worker:mac", 60.0)
    row = leave_behind(redis, leases)
    if is_a_day_ago:
        redis.delete(RqKeys.executions(row.job_id))
        redis.zadd(RqKeys.registry("wip", "demo"), {row.lease_key: time.time() - 1})

    canceled, expired = (wire.encode(wire.Failure(code=code, message="")) for code in ("canceled", "expired"))
    answer = redis.eval(load("cancel.lua"), 0, row.job_id, "alice", canceled, 3600, expired)
    assert answer == [b"ended", b"failed"]

    assert leases.reclaim([row.queue], 5) == (0, [])
    assert redis.hget(RqKeys.job(row.job_id), "status") == b"failed"
    assert redis.hgetall(Keys.outcome_counts) == {b"expired": b"1"}
    assert not redis.exists(RqKeys.registry("wip", "demo"), RqKeys.executions(row.job_id))


def test_a_canceled_job_that_expired_before_its_worker_came_back_is_shown_as_failed_throughout(
    redis: Redis, redis_url: str, workers: Workers
):
    leases = Leases(redis, "mac", "rq:worker:mac", 60.0)
    row = leave_behind(redis, leases, cancel_requested="1")
    assert read(redis_url, row.job_id).status == "failed"

    _, [ended] = leases.reclaim([row.queue], 5)  # a worker is about to record the end
    assert read(redis_url, row.job_id).status == "failed"
    redis.delete(RqKeys.execution(ended.lease_key))

    workers.start()
    until(lambda: outcome(redis, row.job_id))
    assert failure(redis, row.job_id).code == "expired"
    assert done(redis) == [row.job_id]


def test_no_key_without_a_time_to_live_is_left_after_all_jobs_expired(redis: Redis, workers: Workers):
    fields = {"result_ttl": 2, "failure_ttl": 2, "owner": "alice", "created": "1.0"}
    ids = [submit(redis, generate(), fields=fields) for _ in range(8)] + [submit(redis, generate("NAN"), fields=fields)]
    redis.zadd(Keys.jobs_of("alice"), {job_id: index for index, job_id in enumerate(ids)})
    redis.zadd(Keys.deliveries_of("alice"), {"wh_gone": 1})
    redis.zadd(Keys.sweep_schedule, {Keys.jobs_of("alice"): 0, Keys.deliveries_of("alice"): 0})
    killed = workers.start()
    until(lambda: len(done(redis)) == len(ids))
    killed.kill()
    killed.wait()
    other = workers.start()
    until(lambda: not redis.exists(*map(RqKeys.job, ids)))

    until(
        lambda: (
            not redis.exists(Keys.jobs_of("alice"), Keys.deliveries_of("alice"), RqKeys.registry("finished", "demo"))
        )
    )
    until(lambda: redis.zcard(Keys.models) == redis.scard(RqKeys.workers) == 1)
    other.send_signal(signal.SIGTERM)
    other.wait(timeout=60)

    time.sleep(0.1)
    left = {key.decode() for key in redis.scan_iter() if redis.ttl(key) == -1} - PERMANENT
    assert left == set()


def test_a_sweep_drops_ids_of_expired_jobs_and_keeps_live_ones(redis: Redis):
    live = [submit(redis, generate()) for _ in range(3)]
    dead = {f"dead{index}": index for index in range(3000)}
    redis.zadd(Keys.jobs_of("alice"), dead | dict.fromkeys(live, 5000))
    redis.zadd(Keys.sweep_schedule, {Keys.jobs_of("alice"): 0})

    Sweep(redis, ["demo"], 60).run()

    assert redis.zrange(Keys.jobs_of("alice"), 0, -1) == sorted(job_id.encode() for job_id in live)
    assert redis.zscore(Keys.sweep_schedule, Keys.jobs_of("alice")) > time.time() + 50


def test_a_sweep_over_a_slow_link_lets_heartbeats_pass(redis: Redis, monkeypatch: pytest.MonkeyPatch):
    redis.zadd(Keys.jobs_of("alice"), {f"dead{index}": index for index in range(3000)})
    redis.zadd(Keys.sweep_schedule, {Keys.jobs_of("alice"): 0})
    clock = itertools.count(step=2)  # seconds
    monkeypatch.setattr(sweep, "awake_s", lambda: next(clock))

    Sweep(redis, ["demo"], every_s=60).run()
    assert redis.zcard(Keys.jobs_of("alice")) > 1000

    for _ in range(10):
        Sweep(redis, ["demo"], every_s=60).run()
    assert not redis.exists(Keys.jobs_of("alice"))
