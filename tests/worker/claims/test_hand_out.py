"""Jobs that are sent to workers that wait, by the scripts, without a worker."""

import time
from collections.abc import Iterator

import pytest
from redis import Redis
from redis.client import PubSub

from scorepool import store
from scorepool.store import JobField
from scorepool.store.scripts import load
from scorepool.worker import Queue
from scorepool.worker.claims.leases import Claim, Claimed, Leases
from scorepool.worker.claims.messages import read_message
from tests.worker.conftest import Workers, done, generate, submit, until

QUEUES = ("demo:high", "demo", "demo:low")


@pytest.fixture
def messages(redis: Redis) -> Iterator[PubSub]:
    with redis.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(store.Keys.wake("mac"))
        pubsub.get_message(timeout=60)
        yield pubsub


@pytest.fixture
def held(redis: Redis) -> Leases:
    return Leases(redis, "mac", "rq:worker:mac", 60)


def ask(redis: Redis, held: Leases, max_jobs: int, **options: object) -> Claimed:
    wanted = {"max_jobs": max_jobs, "num_in_flight": 0, "max_in_flight": 32, "waits": max_jobs > 0, **options}
    return held.claim([Queue(name, connection=redis) for name in QUEUES], Claim(**wanted))  # type: ignore[arg-type]


def hand_out(redis: Redis, queue: str = "demo", num_jobs: int = 1) -> None:
    """Put jobs on a queue as submit.lua does."""
    for _ in range(num_jobs):
        submit(redis, generate(), queue=queue)
    redis.eval(f"{load('hand_out.lua')}\nhand_out(ARGV[1], tonumber(ARGV[2]))", 0, queue, num_jobs)


def num_sent(messages: PubSub) -> int:
    """Return how many jobs were sent."""
    num = 0
    while message := messages.get_message(timeout=0.1):
        num += read_message(message["data"])[:1] == [b"leased"]
    return num


def test_no_more_jobs_are_sent_than_a_worker_asked_for(redis: Redis, held: Leases, messages: PubSub):
    ask(redis, held, 1)
    for queue in QUEUES:
        hand_out(redis, queue)

    assert num_sent(messages) == 1


def test_a_slow_worker_gets_no_job_that_faster_ones_end_before(redis: Redis, held: Leases, messages: PubSub):
    fast = Leases(redis, "fast", "rq:worker:fast", 60)
    with redis.pubsub(ignore_subscribe_messages=True) as to_fast:
        to_fast.subscribe(store.Keys.wake("fast"))
        to_fast.get_message(timeout=60)
        ask(redis, held, 4, speed=1.0, writes_speed=True)
        ask(redis, fast, 4, speed=10.0, writes_speed=True)

        hand_out(redis, num_jobs=2)
        assert (num_sent(to_fast), num_sent(messages)) == (1, 0)  # it claims the other one
        assert len(ask(redis, fast, 4).jobs) == 1

        ask(redis, fast, 4)
        hand_out(redis, num_jobs=30)
        assert (num_sent(to_fast), num_sent(messages)) == (1, 1)


def test_a_worker_that_begins_a_job_at_once_is_asked_before_a_faster_one_that_is_full(
    redis: Redis, held: Leases, messages: PubSub
):
    full = Leases(redis, "full", "rq:worker:full", 60)
    with redis.pubsub(ignore_subscribe_messages=True) as to_full:
        to_full.subscribe(store.Keys.wake("full"))
        to_full.get_message(timeout=60)
        ask(redis, held, 1, speed=2.0, writes_speed=True)
        ask(redis, full, 1, speed=10.0, writes_speed=True, num_startable=0)

        hand_out(redis)
        assert (num_sent(to_full), num_sent(messages)) == (0, 1)
        hand_out(redis)
        assert (num_sent(to_full), num_sent(messages)) == (1, 0)


def test_full_workers_get_what_a_slow_one_should_not_have(redis: Redis, held: Leases, messages: PubSub):
    full = Leases(redis, "full", "rq:worker:full", 60)
    with redis.pubsub(ignore_subscribe_messages=True) as to_full:
        to_full.subscribe(store.Keys.wake("full"))
        to_full.get_message(timeout=60)
        ask(redis, held, 4, speed=1.0, writes_speed=True)
        ask(redis, full, 4, speed=10.0, writes_speed=True, num_startable=0)

        hand_out(redis, num_jobs=2)
        assert (num_sent(to_full), num_sent(messages)) == (1, 0)


def test_a_worker_with_one_free_row_gets_one_job_before_slower_ones_with_free_rows_do(
    redis: Redis, held: Leases, messages: PubSub
):
    fast = Leases(redis, "fast", "rq:worker:fast", 60)
    with redis.pubsub(ignore_subscribe_messages=True) as to_fast:
        to_fast.subscribe(store.Keys.wake("fast"))
        to_fast.get_message(timeout=5)
        ask(redis, held, 4, speed=1.0, writes_speed=True)
        ask(redis, fast, 4, speed=10.0, writes_speed=True, num_startable=1)

        hand_out(redis)
        hand_out(redis)
        assert (num_sent(to_fast), num_sent(messages)) == (1, 1)


def test_a_worker_whose_rows_a_claim_fills_waits_as_a_full_one(redis: Redis, held: Leases, messages: PubSub):
    fast = Leases(redis, "fast", "rq:worker:fast", 60)
    with redis.pubsub(ignore_subscribe_messages=True) as to_fast:
        to_fast.subscribe(store.Keys.wake("fast"))
        to_fast.get_message(timeout=5)
        for _ in range(2):
            submit(redis, generate())
        assert len(ask(redis, fast, 3, speed=10.0, writes_speed=True, num_startable=2, exceeds_share=True).jobs) == 2
        ask(redis, held, 4, speed=1.0, writes_speed=True)

        hand_out(redis)
        assert (num_sent(to_fast), num_sent(messages)) == (0, 1)


def test_no_jobs_are_sent_beyond_the_max_concurrency_of_a_job_in_flight(redis: Redis, held: Leases, messages: PubSub):
    ask(redis, held, 20, num_in_flight=2, max_in_flight=4)
    for _ in range(4):
        hand_out(redis)

    assert num_sent(messages) == 2


def test_no_jobs_are_sent_to_a_worker_that_wants_no_more(redis: Redis, held: Leases, messages: PubSub):
    ask(redis, held, 4)
    ask(redis, held, 0)
    hand_out(redis)

    assert num_sent(messages) == 0


def test_the_list_of_waiting_workers_expires(redis: Redis, held: Leases, messages: PubSub):
    ask(redis, held, 4)
    hand_out(redis)

    assert num_sent(messages) == 1
    assert redis.zcard(store.Keys.waiting_workers("demo")) == 1
    assert {redis.ttl(store.Keys.waiting_workers(queue)) > 0 for queue in QUEUES} == {True}


def test_a_quarantined_job_of_a_lost_reply_runs_among_no_more_than_its_max_concurrency(redis: Redis, held: Leases):
    submit(redis, generate(), fields={JobField.MAX_CONCURRENCY: 1})
    ask(redis, held, 4)  # the reply is lost
    for _ in range(3):
        submit(redis, generate())

    assert len(ask(redis, held, 4, known=[]).jobs) == 1


def test_jobs_of_a_lost_reply_count_as_jobs_that_were_asked_for(redis: Redis, held: Leases):
    """A worker with --max-jobs runs no more."""
    for _ in range(4):
        submit(redis, generate())
    ask(redis, held, 1)  # the reply is lost

    assert len(ask(redis, held, 1, known=[]).jobs) == 1


def test_a_worker_that_leaves_puts_back_what_is_under_way_to_it(redis: Redis, held: Leases, messages: PubSub):
    submit(redis, generate())
    [known] = ask(redis, held, 4).jobs
    hand_out(redis)
    assert num_sent(messages) == 1

    held.leave([Queue(name, connection=redis) for name in QUEUES], [known.lease_key])

    assert redis.llen("rq:queue:demo") == 1
    assert redis.zrange("rq:wip:demo", 0, -1) == [known.lease_key.encode()]
    hand_out(redis)
    assert num_sent(messages) == 0


def test_a_claim_that_arrives_after_its_worker_has_left_leases_nothing(redis: Redis, held: Leases):
    queues = [Queue(name, connection=redis) for name in QUEUES]
    late = held.claim_arguments(queues, Claim(max_jobs=1, num_in_flight=0, max_in_flight=32, waits=True))
    held.leave(queues, [])
    submit(redis, generate())

    assert held.read_claim(queues, held.claim_script(*late)).jobs == []
    assert redis.zcard(store.Keys.waiting_workers("demo")) == 0


def test_a_message_that_comes_after_its_job_has_ended_runs_nothing(redis: Redis, workers: Workers):
    job_id = submit(redis, generate(max_tokens=200))
    flat = [text for item in redis.hgetall(f"rq:job:{job_id}").items() for text in item]
    request = redis.get(store.Keys.request(job_id)) or b""
    workers.start("--name", "mac")
    until(lambda: redis.zcard("rq:wip:demo"))
    [lease_key] = redis.zrange("rq:wip:demo", 0, -1)
    strings = [b"leased", b"demo", *lease_key.split(b":"), b"%f" % time.time(), request, *flat]
    until(lambda: f"job={job_id}: ends: done" in workers.log)

    redis.publish(store.Keys.wake("mac"), b"".join(b"%d:%s" % (len(text), text) for text in strings))
    submit(redis, generate())
    until(lambda: len(done(redis)) == 2)

    assert workers.log.count(f"job={done(redis)[0]}: begins ") == 1


def test_a_member_of_the_registry_that_is_no_lease_is_left_alone(redis: Redis, held: Leases):
    redis.zadd("rq:wip:demo", {"noise": 9e9})
    redis.hset("rq:execution:noise", mapping={"worker_name": "other", "created_at": 1})

    assert ask(redis, held, 4, max_taken_over=32, known=[]).jobs == []


def test_a_lease_of_a_job_with_an_impossible_id_is_left_alone(redis: Redis, held: Leases):
    redis.hset("rq:job:a b", mapping={"data": "x", "kind": "generate"})
    redis.zadd("rq:wip:demo", {"a b:execution": 9e9})
    redis.hset("rq:execution:a b:execution", mapping={"worker_name": "mac", "created_at": 1})

    assert ask(redis, held, 4, known=[]).jobs == []
    redis.hset("rq:execution:a b:execution", "worker_name", "other")
    assert ask(redis, held, 4, max_taken_over=32).jobs == []
    assert held.reclaim([Queue("demo", connection=redis)], 1, ["a b:execution"]) == (0, [])
