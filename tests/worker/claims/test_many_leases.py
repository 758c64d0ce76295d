"""What workers ask Redis for in a large fleet costs no more than in a small one, and finds the same."""

import time

import pytest
from redis import Redis

from scorepool import store
from scorepool.worker import Queue
from scorepool.worker.claims.leases import GRACE_S, ClaimedJob, Leases
from tests.worker.claims.test_leases import ask, leases
from tests.worker.conftest import generate, status, submit, until

MANY = 150


@pytest.fixture
def queue(redis: Redis) -> Queue:
    return Queue("demo", connection=redis)


def claim_many(redis: Redis, queue: Queue, held: Leases) -> list[ClaimedJob]:
    for _ in range(MANY):
        submit(redis, generate())
    jobs = ask(held, queue, MANY, max_in_flight=MANY, list_length=MANY)
    assert len(jobs) == MANY
    return jobs


def let_end(redis: Redis, job: ClaimedJob) -> None:
    redis.delete(store.RqKeys.execution(job.lease_key))


def num_commands(redis: Redis) -> int:
    return int(redis.info("stats")["total_commands_processed"])


def test_leases_that_were_not_extended_are_found_among_many_at_once(redis: Redis, queue: Queue):
    jobs = claim_many(redis, queue, leases(redis))
    silent = jobs[7::30]
    for job in silent:
        let_end(redis, job)
        redis.zadd(queue.started_job_registry.key, {job.lease_key: time.time() - 61 + GRACE_S})
    assert leases(redis, "other").reclaim([queue], 5)[0] == len(silent)
    assert [status(redis, job.job_id) for job in silent] == ["queued"] * len(silent)
    assert redis.zcard(queue.started_job_registry.key) == MANY - len(silent)


def test_leases_with_scores_of_another_client_are_found_soon(redis: Redis, queue: Queue):
    jobs = claim_many(redis, queue, leases(redis))
    let_end(redis, jobs[0])
    redis.zadd(queue.started_job_registry.key, {jobs[0].lease_key: 9e12})
    other = leases(redis, "other")
    assert sum(other.reclaim([queue], 5)[0] for _ in range(200)) == 1  # one in 1,000 million runs finds none


def test_leases_of_a_dead_worker_are_found_among_many(redis: Redis, queue: Queue):
    jobs = claim_many(redis, queue, leases(redis))
    dead = [job.lease_key for job in jobs[:3]]
    assert leases(redis, "other").reclaim([queue], 5, dead)[0] == 3


def test_a_search_among_many_leases_takes_few_commands(redis: Redis, queue: Queue):
    claim_many(redis, queue, leases(redis))
    other = leases(redis, "other")
    other.reclaim([queue], 5)
    before = num_commands(redis)
    other.reclaim([queue], 5)
    assert num_commands(redis) - before < 60


def test_after_a_look_in_vain_at_many_leases_nobody_looks_for_a_moment(redis: Redis, queue: Queue):
    busy, idle = leases(redis, "busy"), leases(redis, "idle")
    jobs = claim_many(redis, queue, busy)
    ask(busy, queue, 0, begun=[job.lease_key for job in jobs])
    key = store.Keys.nothing_unbegun("demo")

    def looks_in_vain() -> bool:
        assert ask(idle, queue, 1, max_taken_over=32) == []
        return 0 < redis.pttl(key) <= 250 and bool(redis.pexpire(key, 600_000))  # so that the moment is not over yet

    until(looks_in_vain)
    before = num_commands(redis)
    assert ask(leases(redis, "third"), queue, 1, max_taken_over=32) == []
    assert num_commands(redis) - before < 60

    late = submit(redis, generate())
    ask(busy, queue, 1, max_in_flight=MANY + 1)
    redis.delete(key)
    time.sleep(0.8)
    assert [job.job_id for job in ask(idle, queue, 1, max_taken_over=32)] == [late]
