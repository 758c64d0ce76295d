"""Fairness between owners comes before the priority of one owner's jobs, with the API's own submission."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

import scorepool.api.repositories.queue
from scorepool import store, wire
from scorepool.api.auth import Keyring
from scorepool.store.scripts import load
from scorepool.worker import Job, Queue
from scorepool.worker.claims.leases import Claim, ClaimedJob, Leases

WEIGHTS = {"alice": 1, "bob": 1, "carol": 3}
QUEUES = store.queue_names("demo")
LIST_LENGTH = 4


class Pool:
    """The API's and a worker's side of one model's queues."""

    def __init__(self, connection: Redis, redis_url: str, weights: Mapping[str, int] = WEIGHTS) -> None:
        keys = ",".join(f"{name}:{hashlib.sha256(name.encode()).hexdigest()}:{weights[name]}" for name in weights)
        server = store.Settings(api_keys=keys, max_jobs_in_flight=LIST_LENGTH)
        self.runner = asyncio.Runner()
        self.redis = redis.asyncio.Redis.from_url(redis_url)
        keyring = Keyring.load(server)
        self.api = scorepool.api.repositories.queue.Queue(
            self.redis, server, keyring.weight, keyring.has_several_owners
        )
        self.leases = Leases(connection, "mac", "rq:worker:mac", 60.0)
        self.queues = [Queue(name, connection=connection) for name in QUEUES]

    def submit(self, owner: str, priority: wire.Priority = "normal", num: int = 1) -> list[str]:
        ids = scorepool.api.repositories.queue.new_job_ids(num)
        request = wire.Generate(model="demo", prompt="hello", max_tokens=1, priority=priority)
        self.runner.run(self.api.submit(owner, [request] * num, ids))
        return ids

    def claim(self, num: int, excluded: tuple[str, ...] = ()) -> list[tuple[str, str]]:
        """Return the owner and the queue of each job that was claimed."""
        return [(row.fields.get(b"owner", b"").decode(), row.queue.name) for row in self.claim_rows(num, excluded)]

    def claim_rows(self, num: int, excluded: tuple[str, ...] = ()) -> list[ClaimedJob]:
        claim = Claim(max_jobs=num, num_in_flight=0, max_in_flight=1000, list_length=LIST_LENGTH, excluded=excluded)
        return self.leases.claim(self.queues, claim).jobs

    def close(self) -> None:
        self.runner.run(self.redis.aclose())
        self.runner.close()


@pytest.fixture
def pool(redis: Redis, redis_url: str) -> Iterator[Pool]:
    pool = Pool(redis, redis_url)
    yield pool
    pool.close()


@pytest.mark.parametrize("weights", [{"alice": 3}, {"alice": 1, "bob": 1}])
def test_a_job_tells_its_worker_whether_there_are_several_owners(weights: dict[str, int], redis: Redis, redis_url: str):
    pool = Pool(redis, redis_url, weights)
    pool.submit("alice")
    [row] = pool.claim_rows(1)
    job = Job.from_claimed(row, redis, {})
    assert (job.weight, job.is_of_one_of_several) == (1, len(weights) > 1)
    pool.close()


def test_a_flood_of_high_jobs_delays_a_normal_job_of_another_owner_by_one_job(pool: Pool):
    pool.submit("alice", "high", 50)
    pool.claim(7)
    pool.submit("bob")
    assert ("bob", "demo") in pool.claim(2)


def test_a_normal_job_behind_the_normal_jobs_of_an_owner_with_high_jobs_gets_its_turn(pool: Pool):
    pool.submit("alice", "normal", 20)  # they fill the list, so bob's jobs go to his backlog
    pool.submit("alice", "high", 20)
    pool.submit("bob", "normal", 3)
    assert Counter(pool.claim(6)) == {("alice", "demo:high"): 3, ("bob", "demo"): 3}


def test_owners_share_the_claims_of_a_worker_by_weight_whatever_their_priorities(pool: Pool):
    pool.submit("alice", "high", 60)
    pool.submit("bob", "low", 60)
    pool.submit("carol", "normal", 60)
    assert Counter(owner for _ in range(50) for owner, _ in pool.claim(1)) == {"alice": 10, "bob": 10, "carol": 30}


def test_an_owners_own_jobs_run_in_the_order_of_their_priorities(pool: Pool):
    pool.submit("bob", "low", 3)
    for priority in ("low", "normal", "high"):
        pool.submit("alice", priority, 6)
    order = [queue for owner, queue in pool.claim(30) if owner == "alice"]
    assert order == [*["demo:high"] * 6, *["demo"] * 6, *["demo:low"] * 6]


def test_an_owner_that_waited_for_nobody_saves_up_no_turns(pool: Pool):
    pool.submit("alice", "high", 40)
    pool.submit("bob", "low", 1)
    pool.claim(20)
    pool.submit("bob", "low", 30)
    assert Counter(owner for owner, _ in pool.claim(20)) == {"alice": 10, "bob": 10}


def test_the_jobs_of_excluded_owners_are_left_and_those_of_others_found_behind_them(pool: Pool):
    pool.submit("alice", "normal", 20)
    assert pool.claim(3, excluded=("alice",)) == []
    pool.submit("bob", "normal", 2)
    assert pool.claim(3, excluded=("alice",)) == [("bob", "demo")] * 2
    assert len(pool.claim(30)) == 20


def test_a_job_that_was_deleted_by_another_tool_leaves_the_list(pool: Pool, redis: Redis):
    gone, _ = pool.submit("alice", "high", 2)
    pool.submit("bob", "low")
    redis.delete(f"rq:job:{gone}")
    assert pool.claim(5) == [("alice", "demo:high"), ("bob", "demo:low")]
    assert redis.keys("rq:queue:*") == []


SUBMIT = st.tuples(st.sampled_from(list(WEIGHTS)), st.sampled_from(["high", "normal", "low"]), st.integers(1, 9))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=st.lists(st.one_of(SUBMIT, st.integers(1, 6)), max_size=30))
def test_every_job_is_claimed_once_by_priority_and_no_owner_gets_ahead(redis: Redis, redis_url: str, acts):
    redis.flushdb()
    pool = Pool(redis, redis_url)
    waiting = {owner: Counter[str]() for owner in WEIGHTS}

    def claim(num: int) -> None:
        present = {owner for owner in WEIGHTS if waiting[owner].total()}
        has_choice = len({queue for owner in present for queue, n in waiting[owner].items() if n}) > 1
        claimed = pool.claim(num)
        assert len(claimed) == min(num, sum(counter.total() for counter in waiting.values()))
        for owner, queue in claimed:
            assert queue == next(name for name in QUEUES if waiting[owner][name])
            waiting[owner][queue] -= 1
        served = Counter(owner for owner, _ in claimed)
        if (
            has_choice
        ):  # an owner of weight 1 that still waits was served at least as often as another, but for one turn
            for owner in (owner for owner in present if waiting[owner].total()):
                for other in present:
                    assert served[other] <= (served[owner] + 1) * WEIGHTS[other] / WEIGHTS[owner] + 1

    try:
        for act in acts:
            if isinstance(act, int):
                claim(act)
            else:
                owner, priority, num = act
                pool.submit(owner, priority, num)
                waiting[owner][store.queue_name("demo", priority)] += num
        while any(counter.total() for counter in waiting.values()):
            claim(5)
        pool.claim(1)
    finally:
        pool.close()
    assert redis.keys("rq:queue:*") == redis.keys("scorepool:backlog:*") == redis.keys("scorepool:turns:*") == []


def test_deliveries_of_one_owner_let_those_of_another_through(redis: Redis):
    send = redis.register_script(load("send_test_event.lua"))
    for number in range(200):
        send(args=[f"wh_alice_{number}", "alice", "e", 3600])
    send(args=["wh_bob", "bob", "e", 3600])
    webhooks, leases = Queue(store.WEBHOOKS, connection=redis), Leases(redis, "hooks", "rq:worker:hooks", 60.0)

    first = [
        row.job_id for row in leases.claim([webhooks], Claim(max_jobs=64, num_in_flight=0, max_in_flight=200)).jobs
    ]
    then = [row.job_id for row in leases.claim([webhooks], Claim(max_jobs=2, num_in_flight=64, max_in_flight=200)).jobs]

    assert first == [f"wh_alice_{number}" for number in range(64)]
    assert "wh_bob" in then
    rest = leases.claim([webhooks], Claim(max_jobs=200, num_in_flight=66, max_in_flight=400)).jobs
    assert len(first) + len(then) + len(rest) == 201
