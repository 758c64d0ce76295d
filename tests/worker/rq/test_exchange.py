"""Ends and claims travel in one exchange, and an end that cannot be sent is handed back."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from rq.timeouts import UnixSignalDeathPenalty
from rq.worker import WorkerStatus

from scorepool import store
from scorepool.worker import Queue
from scorepool.worker import Redis as Client
from scorepool.worker.claims.leases import Claim, Leases
from scorepool.worker.redis_link.link_speed import MIN_MESSAGE_BYTES
from scorepool.worker.rq.commit import ResultCommitter
from scorepool.worker.rq.exchange import Exchange, Exchanger
from scorepool.worker.rq.in_flight import InFlightJob
from tests.fleet.link import Link
from tests.worker.conftest import done, generate, submit
from tests.worker.rq.test_success_writer import over

WANTED = Claim(max_jobs=1, num_in_flight=0, max_in_flight=32)


@contextmanager
def exchanger(url: str, is_heard: bool) -> Iterator[Exchanger]:
    with Client.from_url(url, retry=Retry(NoBackoff(), 0)) as client:
        leases = Leases(client, "mac", "rq:worker:mac", 2.0)
        committer = ResultCommitter(
            client, leases, 500, UnixSignalDeathPenalty, lambda *error: None, logging.getLogger()
        )
        yield Exchanger(client, leases, committer, lambda at: is_heard)


def exchange(redis: Redis, jobs: list[InFlightJob], claim: Claim | None = None) -> Exchange:
    return Exchange(jobs, None, WorkerStatus.IDLE, [Queue("demo", connection=redis)], claim)


def test_ends_and_a_claim_take_one_round_trip(redis: Redis, redis_url: str):
    jobs = over(redis, Leases(redis, "mac", "rq:worker:mac", 60.0), 300, 300)
    job_id = submit(redis, generate())
    with Link(redis_url, delay_s=0.2) as link, exchanger(link.url, is_heard=True) as sender:
        sender.run(exchange(redis, []))
        sender.run(exchange(redis, [], Claim(max_jobs=0, num_in_flight=0, max_in_flight=32)))  # connects, loads scripts
        num_turns = link.num_turns

        exchanged = sender.run(exchange(redis, jobs, WANTED))

    assert exchanged.recorded == jobs
    assert exchanged.claimed is not None
    assert [job.job_id for job in exchanged.claimed.jobs] == [job_id]
    assert link.num_turns == num_turns + 1
    assert exchanged.elapsed_s >= 0.4
    assert sender.link_speed.round_trip_s >= 0.4


def test_a_claim_asks_for_what_the_link_carries(redis: Redis, redis_url: str):
    for _ in range(8):
        submit(redis, bytes(200_000))
    with exchanger(redis_url, is_heard=True) as sender:
        exchanged = sender.run(exchange(redis, [], Claim(max_jobs=8, num_in_flight=0, max_in_flight=32)))
    assert exchanged.claimed is not None
    assert len(exchanged.claimed.jobs) == 2  # the second exceeds 256 KiB


@pytest.mark.parametrize("is_heard", [True, False])
def test_an_end_that_cannot_be_sent_is_handed_back_unless_redis_is_away(redis: Redis, redis_url: str, is_heard: bool):
    jobs = over(redis, Leases(redis, "mac", "rq:worker:mac", 60.0), 3000)
    with Link(redis_url) as link, exchanger(link.url, is_heard) as sender:
        sender.run(exchange(redis, [], WANTED))
        link.drop()
        while sender.link_speed.message_bytes > MIN_MESSAGE_BYTES:
            sender.link_speed.record_timeout()
        sender.link_speed.record(500, 0.01)
        for _ in range(3):
            with pytest.raises(RedisError):
                sender.run(exchange(redis, jobs))
            if sender.stuck:
                break
        assert sender.stuck == (jobs if is_heard else [])


def test_a_heartbeat_takes_no_job_for_lost_whose_end_is_on_its_way_back(redis: Redis, redis_url: str):
    leases = Leases(redis, "mac", "rq:worker:mac", 60.0)
    recorded, lost = jobs = over(redis, leases, 300, 300)
    with exchanger(redis_url, is_heard=True) as sender:
        sender.run(exchange(redis, [recorded]))
    redis.zrem("rq:wip:demo", lost.lease_key)

    assert leases.extend(jobs)[0] == {lost.lease_key}
    assert done(redis) == [recorded.job.id]


@pytest.mark.parametrize("how", ["release", "reclaim"])
def test_an_upload_is_deleted_with_its_lease(redis: Redis, how: str):
    leases = Leases(redis, "mac", "rq:worker:mac", 60.0)
    [inflight] = over(redis, leases, 300)
    upload = store.Keys.outcome_upload(inflight.lease_key)
    redis.set(upload, b"part")
    if how == "release":
        assert leases.release([inflight]) == 1
    else:
        redis.delete(store.RqKeys.execution(inflight.lease_key))
        assert leases.reclaim([Queue("demo", connection=redis)], crash_limit=5)[0] == 1
    assert not redis.exists(upload)
