"""Workers whose clocks are wrong: Redis's clock decides when a job starts, expires or is due, and is what they show."""

import asyncio
import signal
import sys
import time
from datetime import datetime, timedelta

import pytest
import redis.asyncio as redis_asyncio
from redis import Redis
from rq import Retry

from scorepool import wire
from scorepool.api.metrics.queue_snapshot import QueueSnapshot
from scorepool.api.repositories.models import Models
from scorepool.store import Keys
from scorepool.worker import Queue
from scorepool.worker.claims.leases import GRACE_S
from scorepool.worker.rq.clock import REDIS_CLOCK
from tests.worker.conftest import Workers, failure, generate, outcome, status, submit, until

HOUR_S = 3600
BUSY_S = 60  # that a busy machine delays what a worker measures and writes; the wrong clocks are off by more
wrong = pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S], ids=["ahead", "behind"])


@wrong
def test_a_job_expires_by_the_clock_of_redis_and_not_of_the_worker(redis: Redis, workers: Workers, ahead_s: int):
    late = submit(redis, generate(), fields={"expires_at": repr(time.time() - 0.01)})
    running = submit(redis, generate(max_tokens=100_000), fields={"expires_at": repr(time.time() + 2)})
    in_time = submit(redis, generate(), fields={"expires_at": repr(time.time() + 600)})

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
    assert started_at <= ended_at < time.time() + BUSY_S
    assert 0 < float(redis.hget("rq:worker:mac", "total_working_time")) < 600


def redis_time(redis: Redis) -> float:
    seconds, microseconds = redis.time()
    return seconds + microseconds / 1e6


def unix_s(text: bytes) -> float:
    return datetime.fromisoformat(text.decode()).timestamp()


@pytest.mark.parametrize("ahead_s", [300, -300], ids=["ahead", "behind"])
def test_all_times_that_a_worker_writes_are_by_the_clock_of_redis(redis: Redis, workers: Workers, ahead_s: int):
    """Check a success, a failure that RQ's methods record, a retry, the worker's own record and its registration."""
    before = redis_time(redis)
    good, bad = submit(redis, generate()), submit(redis, b"not a request")
    flaky = Queue("demo", connection=redis).enqueue("flaky", retry=Retry(max=3))
    process = workers.start("--name", "mac", worker="FunctionsWorker", FAKE_CLOCK_AHEAD_S=str(ahead_s))
    until(lambda: {status(redis, one) for one in (good, bad, flaky.id)} == {"finished", "failed"})
    birth = unix_s(redis.hget("rq:worker:mac", "birth"))
    beat = redis.hget("rq:worker:mac", "last_heartbeat")
    until(lambda: redis.hget("rq:worker:mac", "last_heartbeat") != beat)
    beat_age_s = redis_time(redis) - unix_s(redis.hget("rq:worker:mac", "last_heartbeat"))
    served = wire.parse(redis.get(Keys.served_model("mac")), wire.ServedModel, "msgpack")
    expires_in_s = redis.zscore(Keys.models, "mac") - redis_time(redis)
    recent_age_s = redis_time(redis) - redis.zscore(Keys.recent_models, "demo")
    process.terminate()
    assert process.wait(60) == 0
    after = redis_time(redis)

    assert before - BUSY_S < birth < after + BUSY_S
    assert abs(beat_age_s) < BUSY_S
    assert before - BUSY_S < served.created < after + BUSY_S
    assert abs(expires_in_s) < BUSY_S
    assert abs(recent_age_s) < BUSY_S
    for field in ("shutdown_requested_date", "death"):
        assert before - BUSY_S < unix_s(redis.hget("rq:worker:mac", field)) < after + BUSY_S, field
    for job_id in (good, bad, flaky.id):
        times = redis.hmget(f"rq:job:{job_id}", "created_at", "enqueued_at", "started_at", "ended_at", "last_heartbeat")
        assert all(before - BUSY_S < unix_s(text) < after + BUSY_S for text in times), times
        [(_, result), *_] = redis.xrevrange(f"rq:results:{job_id}")
        started, ended = float(result[b"execution_started_at"]), float(result[b"execution_ended_at"])
        assert before - BUSY_S < started <= ended < after + BUSY_S
    for registry, job_id in (("finished", good), ("finished", flaky.id), ("failed", bad)):
        ttl_s = redis.ttl(f"rq:job:{job_id}")
        kept_until = redis.zscore(f"rq:{registry}:demo", job_id)
        assert kept_until == pytest.approx(redis_time(redis) + ttl_s, abs=BUSY_S), registry


def test_no_module_of_rq_reads_the_clock_of_the_machine():
    """RQ's modules hold `now` by name; a module that a new release of RQ adds must be added to worker/rq/clock.py."""
    modules = [module for name, module in sys.modules.items() if name.startswith("rq.") and hasattr(module, "now")]
    assert len(modules) > 5
    assert {module.__name__ for module in modules if module.now != REDIS_CLOCK.now} <= {"rq.cron"}


def heartbeat_age_s(redis_url: str) -> float:
    """Return what the alert `ScorepoolWorkerSilent` compares with 30 s, as the API reads it."""

    async def read() -> float:
        async with redis_asyncio.Redis.from_url(redis_url) as connection:
            live = await Models(connection).live()
            return (await QueueSnapshot.read(connection, live)).heartbeat_age_s["demo"]

    return asyncio.run(read())


def test_a_pool_of_wrong_clocks_shows_right_ages_and_does_all_jobs(redis: Redis, redis_url: str, workers: Workers):
    """One Mac is 300 s ahead, one 300 s behind: no alert for the one, and the other's silence is seen."""
    settings = {"SCOREPOOL_LEASE_S": "6", "SCOREPOOL_MAX_JOBS_IN_FLIGHT": "4"}
    workers.start("--name", "ahead", FAKE_CLOCK_AHEAD_S="300", **settings)
    behind = workers.start("--name", "behind", FAKE_CLOCK_AHEAD_S="-300", **settings)
    until(lambda: redis.zcard(Keys.models) == 2)
    ids = [submit(redis, generate(max_tokens=1500)) for _ in range(8)]  # so long that both workers have to help
    until(lambda: all(outcome(redis, job_id) for job_id in ids))
    times = [redis.hmget(f"rq:job:{job_id}", "started_at", "ended_at", "worker_name") for job_id in ids]
    awake_s = heartbeat_age_s(redis_url)
    behind.send_signal(signal.SIGSTOP)
    stopped_at = redis_time(redis)
    time.sleep(4)
    silent_s = heartbeat_age_s(redis_url)
    read_at = redis_time(redis)

    assert {name for *_, name in times} == {b"ahead", b"behind"}
    assert all(abs(unix_s(started) - redis_time(redis)) < 2 * BUSY_S for started, *_ in times)
    assert all(-0.001 < unix_s(ended) - unix_s(started) < BUSY_S for started, ended, _ in times)
    assert 0 <= awake_s < BUSY_S
    assert 3.5 < silent_s < read_at - stopped_at + BUSY_S
