"""Redis keys of a wrong type: no worker ends, no job fails, and no end of a job is half-written."""

import time
from collections import Counter

import pytest
from redis import Redis
from rq import Retry

from scorepool import store, wire
from scorepool.store import JobField, Keys, RqKeys
from scorepool.worker import Queue
from tests.worker.conftest import Workers, done, failure, generate, outcome, status, submit, until

BOOKKEEPING = [
    RqKeys.registry("finished", "demo"),
    RqKeys.registry("failed", "demo"),
    RqKeys.registry("deferred", "demo"),
    Keys.outcome_counts,
    store.DONE,
    Keys.deliveries_of("alice"),
    Keys.endpoints_of("alice"),
    Keys.sweep_schedule,
    RqKeys.queue("webhooks"),
]
OF_A_JOB = [RqKeys.results("ID"), RqKeys.executions("ID"), RqKeys.dependents("ID"), Keys.outcome("ID")]


def give_wrong_type(redis: Redis, key: str) -> None:
    """Give a key a wrong type: a set, or a string if the key must be a set."""
    redis.delete(key)
    redis.set(key, "wrong") if "depend" in key else redis.sadd(key, "wrong")


@pytest.mark.parametrize("keys", [*([key] for key in BOOKKEEPING), OF_A_JOB])
def test_jobs_end_once_if_a_bookkeeping_key_has_a_wrong_type(redis: Redis, workers: Workers, keys: list[str]):
    good = {submit(redis, generate(), webhook=True): key for key in keys}
    bad = {submit(redis, generate("NAN"), webhook=True): key for key in keys}
    for job_id, key in (good | bad).items():
        give_wrong_type(redis, key.replace("ID", job_id))

    worker = workers.start("--burst", SCOREPOOL_CRASH_LIMIT="2")

    assert worker.wait(timeout=60) == 0
    assert all(isinstance(outcome(redis, job_id), wire.Result) for job_id in good)
    assert {failure(redis, job_id).code for job_id in bad} == {"numeric"}
    assert [{status(redis, job_id) for job_id in jobs} for jobs in (good, bad)] == [{"finished"}, {"failed"}]
    if store.DONE not in keys:
        assert Counter(done(redis)) == Counter([*good, *bad])
    assert redis.zcard(RqKeys.registry("wip", "demo")) == 0
    assert "Traceback" not in workers.log
    for job_id, key in good.items():
        assert workers.log.count(f"the Redis key {key.replace('ID', job_id)} is no ") <= 1


@pytest.mark.parametrize("key", [RqKeys.registry("wip", "demo"), RqKeys.queue("demo"), Keys.fair_share("demo")])
def test_jobs_of_a_queue_with_a_wrong_key_wait_and_other_queues_are_served(redis: Redis, workers: Workers, key: str):
    waiting = submit(redis, generate())
    other = submit(redis, generate(), queue="demo:low")
    jobs = redis.lrange("rq:queue:demo", 0, -1)
    give_wrong_type(redis, key)

    worker = workers.start()

    until(lambda: outcome(redis, other))
    until(lambda: f"the Redis key {key} is no " in workers.log)
    assert worker.poll() is None
    assert status(redis, waiting) == "queued"
    redis.delete(key)
    if key == RqKeys.queue("demo"):
        redis.rpush(key, *jobs)
    until(lambda: outcome(redis, waiting))
    assert "Traceback" not in workers.log


def test_a_running_job_finishes_after_its_registry_got_a_wrong_type(redis: Redis, workers: Workers):
    job_id = submit(redis, generate(max_tokens=400))
    worker = workers.start()
    until(lambda: status(redis, job_id) == "started")

    give_wrong_type(redis, RqKeys.registry("wip", "demo"))

    until(lambda: isinstance(outcome(redis, job_id), wire.Result))
    assert worker.poll() is None


@pytest.mark.parametrize("key", [Keys.models, RqKeys.registry("finished", "demo")])
def test_heartbeats_and_maintenance_go_on_if_a_key_has_a_wrong_type(redis: Redis, workers: Workers, key: str):
    give_wrong_type(redis, key)
    worker = workers.start(SCOREPOOL_LEASE_S="1")
    job_id = submit(redis, generate(max_tokens=600))  # as long as three leases

    until(lambda: isinstance(outcome(redis, job_id), wire.Result))

    assert worker.poll() is None
    assert redis.hget(RqKeys.job(job_id), JobField.MAX_CONCURRENCY) is None  # no worker reclaimed the job


@pytest.mark.parametrize("key", [Keys.models, Keys.recent_models])
def test_a_worker_whose_registration_fails_still_reclaims_jobs_of_dead_workers(
    redis: Redis, workers: Workers, key: str
):
    worker = workers.start(SCOREPOOL_LEASE_S="1")
    until(lambda: redis.exists(Keys.models))
    give_wrong_type(redis, key)
    time.sleep(2)  # several heartbeats
    job_id = submit(redis, generate())
    redis.lrem(RqKeys.queue("demo"), 0, job_id)
    redis.zadd(RqKeys.registry("wip", "demo"), {f"{job_id}:gone": 2e9})

    until(lambda: isinstance(outcome(redis, job_id), wire.Result), timeout_s=30)

    assert worker.poll() is None
    assert "Traceback" not in workers.log


def test_a_retry_waits_until_its_queue_is_a_list_again_and_other_jobs_end(redis: Redis, workers: Workers):
    retried = Queue("demo", connection=redis).enqueue("break_queue", "demo", retry=Retry(max=3))
    worker = workers.start("--with-scheduler", worker="FunctionsWorker")
    until(lambda: status(redis, retried.id) == "scheduled")

    other = submit(redis, generate(), queue="demo:low")
    until(lambda: isinstance(outcome(redis, other), wire.Result))
    redis.delete(RqKeys.queue("demo"))

    until(lambda: status(redis, retried.id) == "finished")
    assert worker.poll() is None
    assert "Redis is away" not in workers.log


def test_a_dependent_waits_until_its_queue_is_a_list_again(redis: Redis, workers: Workers):
    parent = Queue("demo", connection=redis).enqueue("break_queue", "demo:low")
    dependent = Queue("demo:low", connection=redis).enqueue("add", 1, depends_on=parent)
    workers.start("--with-scheduler", worker="FunctionsWorker")
    until(lambda: status(redis, parent.id) == "finished")
    assert status(redis, dependent.id) == "scheduled"

    redis.delete(RqKeys.queue("demo:low"))

    until(lambda: status(redis, dependent.id) == "finished")


def test_a_dependent_that_cannot_be_read_keeps_no_other_job_from_its_end(redis: Redis, workers: Workers):
    queue = Queue("demo", connection=redis)
    parent = queue.enqueue("add", 1)
    wrong_hash, wrong_time, wrong_set, good = (queue.enqueue("add", 1, depends_on=parent) for _ in range(4))
    give_wrong_type(redis, wrong_hash.key)
    redis.hset(wrong_time.key, "created_at", "not a time")
    give_wrong_type(redis, wrong_set.dependencies_key)

    worker = workers.start(worker="FunctionsWorker")

    until(lambda: status(redis, good.id) == "finished")
    assert status(redis, parent.id) == "finished"
    assert worker.poll() is None


STARTING = [
    *("rq:workers", "rq:workers:demo", "rq:worker:mac", "rq:clean_registries:demo", "rq:groups"),
    *("rq:scheduler-lock:demo", "rq:execution:gone:gone", Keys.models),
]


@pytest.mark.parametrize("key", STARTING)
def test_a_worker_starts_works_and_stops_beside_a_key_of_a_wrong_type(redis: Redis, workers: Workers, key: str):
    redis.rpush(key, "wrong")
    redis.zadd(RqKeys.registry("wip", "demo"), {"gone:gone": 2e9})
    job_id = submit(redis, generate())

    worker = workers.start("--burst", "--with-scheduler", "--name", "mac")

    assert worker.wait(timeout=60) == 0
    assert isinstance(outcome(redis, job_id), wire.Result)
    assert "Traceback" not in workers.log


def test_data_that_rqs_cleaners_cannot_read_stops_no_worker(redis: Redis, workers: Workers):
    broken, job_id = submit(redis, generate(), fields={"created_at": "not a time"}), submit(redis, generate())
    redis.lrem(RqKeys.queue("demo"), 1, broken)
    redis.rpush(f"{RqKeys.queue('demo')}:intermediate", broken)  # as left by a stock worker that died

    assert workers.start("--burst").wait(timeout=60) == 0

    assert isinstance(outcome(redis, job_id), wire.Result)


def test_a_lease_of_a_wrong_type_is_replaced_by_its_worker(redis: Redis, workers: Workers):
    ids = [submit(redis, generate(max_tokens=400)) for _ in range(3)]  # two seconds, as long as two leases
    workers.start(SCOREPOOL_LEASE_S="1")
    until(lambda: redis.zcard(RqKeys.registry("wip", "demo")) == 3)
    keys = redis.keys("rq:execution:*")
    for key in keys:
        give_wrong_type(redis, key.decode())

    until(lambda: [redis.type(key) for key in keys] == [b"hash"] * 3)
    until(lambda: all(outcome(redis, job_id) for job_id in ids))

    assert Counter(done(redis)) == Counter(ids)
    assert "its lease is lost" not in workers.log


def test_a_lease_of_a_wrong_type_whose_worker_is_gone_ends(redis: Redis, workers: Workers):
    job_id = submit(redis, generate())
    redis.lrem(RqKeys.queue("demo"), 1, job_id)
    redis.zadd(RqKeys.registry("wip", "demo"), {f"{job_id}:gone": 2e9})
    redis.set(RqKeys.execution(f"{job_id}:gone"), "wrong")

    workers.start(SCOREPOOL_LEASE_S="1")

    until(lambda: isinstance(outcome(redis, job_id), wire.Result))


def test_scheduled_jobs_run_if_the_entry_of_the_scheduler_gets_a_wrong_type(redis: Redis, workers: Workers):
    worker = workers.start("--with-scheduler", worker="FunctionsWorker")
    until(lambda: redis.keys("rq:scheduler:*"))
    [key] = redis.keys("rq:scheduler:*")
    give_wrong_type(redis, key.decode())

    job = Queue("demo", connection=redis).enqueue("flaky", retry=Retry(max=3, interval=1))

    until(lambda: status(redis, job.id) == "finished")
    assert worker.poll() is None
