"""Weighted round robin between the owners of a queue, with the API's own submission and real workers."""

import asyncio
import hashlib
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

import scorepool.api.repositories.queue
from scorepool import store
from scorepool.api.auth import Keyring
from scorepool.api.http.errors import QueueFull
from scorepool.store import JobField
from scorepool.store.scripts import load
from scorepool.worker import Queue
from scorepool.worker.claims.leases import Claim, ClaimedJob, Leases
from tests.worker.conftest import Workers, done, generate, status, until

WEIGHTS = {"alice": 1, "bob": 3, "carol": 1}


class Api:
    """The API's side of one queue, `demo`."""

    def __init__(self, redis_url: str, *owners: str, batch: int = 64, max_depth: int = 100_000) -> None:
        keys = ",".join(f"{owner}:{hashlib.sha256(owner.encode()).hexdigest()}:{WEIGHTS[owner]}" for owner in owners)
        server = store.Settings(api_keys=keys, max_jobs_in_flight=batch, max_queue_depth=max_depth)
        self.runner = asyncio.Runner()
        self.redis = redis.asyncio.Redis.from_url(redis_url)
        keyring = Keyring.load(server)
        self.queue = scorepool.api.repositories.queue.Queue(
            self.redis, server, keyring.weight, keyring.has_several_owners
        )

    def submit(self, owner: str, num: int = 1, max_tokens: int = 1) -> list[str]:
        ids = scorepool.api.repositories.queue.new_job_ids(num)
        self.runner.run(self.queue.submit(owner, [generate(max_tokens=max_tokens)] * num, ids))
        return ids

    def cancel(self, owner: str, job_id: str) -> None:
        self.runner.run(self.queue.cancel(owner, job_id))

    def close(self) -> None:
        self.runner.run(self.redis.aclose())
        self.runner.close()


@pytest.fixture
def shared(redis_url: str) -> Iterator[Api]:
    """An API with two owners whose queue keeps 64 jobs in RQ's list."""
    shared = Api(redis_url, "alice", "bob")
    yield shared
    shared.close()


# Operations on a queue whose list in RQ holds at most BATCH jobs.
BATCH = 4
SUBMIT = st.tuples(st.just("submit"), st.sampled_from(list(WEIGHTS)), st.integers(1, 12))
CLAIM = st.tuples(st.just("claim"), st.integers(1, 6))
CANCEL = st.tuples(st.just("cancel"), st.integers(0, 50))
GIVE_BACK = st.just(("give back",))
PLAIN = st.just(("plain",))
ACTS = st.lists(st.one_of(SUBMIT, SUBMIT, CLAIM, CLAIM, CANCEL, GIVE_BACK, PLAIN), max_size=40)


class Line:
    """A model of the queue: the order in which each owner's jobs must be claimed, and how long each may wait."""

    def __init__(self, connection: Redis, server: Api) -> None:
        connection.flushdb()
        self.redis = connection
        self.server = server
        self.queue = Queue("demo", connection=connection)
        self.leases = Leases(connection, "mac", "rq:worker:mac", 60.0)
        self.waiting: dict[str, list[str]] = {
            owner: [] for owner in (*WEIGHTS, "plain")
        }  # by owner, in order of submission
        self.in_flight: list[tuple[str, ClaimedJob]] = []
        self.claimed: dict[str, None] = {}  # jobs that were given back are included
        self.num_claimed: Counter[str] = Counter()  # by owner; each job counts once
        # By waiting job: the most jobs of each other owner that may be claimed before it.
        self.bounds: dict[str, dict[str, float]] = {}

    def submit(self, owner: str, num: int) -> None:
        ids = self.server.submit(owner, num)
        on_list = {id_.decode() for id_ in self.redis.lrange(self.queue.key, 0, -1)}
        for id_ in ids:
            self.waiting[owner].append(id_)
            num_before = len([other for other in self.waiting[owner] if other not in on_list])
            turns = {other: (num_before + 1) * weight / WEIGHTS[owner] + 1 for other, weight in WEIGHTS.items()}
            self.bounds[id_] = {
                other: self.num_claimed[other] + len(on_list) + num for other, num in turns.items() if other != owner
            }

    def plain(self) -> None:
        """Submit a job without an owner, with RQ's own method."""
        self.waiting["plain"].append(self.queue.enqueue("add", 1, 2).id)

    def claim(self, room: int) -> None:
        num_waiting = sum(map(len, self.waiting.values()))
        claim = Claim(max_jobs=room, num_in_flight=0, max_in_flight=1000, list_length=BATCH)
        rows = self.leases.claim([self.queue], claim).jobs
        assert len(rows) == min(room, num_waiting)
        for row in rows:
            owner = row.fields.get(b"owner", b"plain").decode()
            assert row.job_id == self.waiting[owner].pop(0)
            self.in_flight.append((owner, row))
            if row.job_id not in self.claimed:
                self.check_bound(owner, row.job_id)
        assert self.redis.llen(self.queue.key) >= min(BATCH, num_waiting - len(rows))

    def check_bound(self, owner: str, job_id: str) -> None:
        for other, most in self.bounds.get(job_id, {}).items():
            assert self.num_claimed[other] <= most, f"{owner} waited too long for {other}"
        self.claimed[job_id] = None
        self.num_claimed[owner] += 1

    def cancel(self, index: int) -> None:
        jobs = [(owner, id_) for owner in WEIGHTS for id_ in self.waiting[owner]]
        if jobs:
            owner, id_ = jobs[index % len(jobs)]
            self.server.cancel(owner, id_)
            self.waiting[owner].remove(id_)

    def give_back(self) -> None:
        jobs = [Lease(f"{row.job_id}:{row.execution_id}", self.queue) for _, row in self.in_flight]
        assert self.leases.release(jobs) == len(jobs)
        for owner, row in reversed(self.in_flight):
            self.waiting[owner].insert(0, row.job_id)
        self.in_flight.clear()

    def check_keys(self) -> None:
        """Check that each waiting job is in exactly one list and that its status in RQ names that list."""
        on_list = [id_.decode() for id_ in self.redis.lrange(self.queue.key, 0, -1)]
        behind = {id_.decode() for id_ in self.redis.zrange("rq:deferred:demo", 0, -1)}
        everyone = [id_ for ids in self.waiting.values() for id_ in ids]
        assert sorted([*on_list, *behind]) == sorted(everyone)
        for id_ in everyone:
            assert status(self.redis, id_) == ("deferred" if id_ in behind else "queued")


@dataclass(frozen=True)
class Lease:
    """The attributes of a held job that Leases.release reads."""

    lease_key: str
    queue: Queue


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=ACTS)
def test_each_owner_is_served_in_order_and_in_proportion_to_its_weight(redis: Redis, redis_url: str, acts):
    server = Api(redis_url, *WEIGHTS, batch=BATCH)
    line = Line(redis, server)
    try:
        for name, *values in acts:
            getattr(line, name.replace(" ", "_"))(*values)
            line.check_keys()
        while any(line.waiting.values()):
            line.claim(5)
            line.check_keys()
    finally:
        server.close()
    assert redis.keys("scorepool:backlog:*") == []
    line.claim(1)
    assert redis.keys("scorepool:turns:*") == []


def test_an_owner_that_submits_again_after_each_claim_does_not_delay_others(redis: Redis, redis_url: str):
    server = Api(redis_url, *WEIGHTS, batch=BATCH)
    line = Line(redis, server)
    line.submit("alice", BATCH)
    line.submit("carol", 5)
    for _ in range(20):
        line.submit("alice", 1)
        line.claim(1)
    server.close()
    assert line.num_claimed["carol"] == 5


def test_an_owner_gets_a_share_of_claims_in_proportion_to_its_weight(redis: Redis, redis_url: str):
    server = Api(redis_url, *WEIGHTS, batch=BATCH)
    line = Line(redis, server)
    for owner in WEIGHTS:
        line.submit(owner, 60)
    line.claim(BATCH)  # the jobs that reached RQ's list before a second owner submitted
    before = line.num_claimed.copy()
    line.claim(50)
    server.close()
    assert line.num_claimed - before == Counter(alice=10, bob=30, carol=10)


@pytest.mark.parametrize("weight", ["nan", "inf", "0", "-1", "", "x"])
def test_an_invalid_weight_counts_as_one(shared: Api, redis: Redis, weight: str):
    ids = shared.submit("alice", 200)
    for id_ in ids:
        redis.hset(f"rq:job:{id_}", "weight", weight)

    leases = Leases(redis, "mac", "rq:worker:mac", 60.0)
    rows = leases.claim([Queue("demo", connection=redis)], Claim(max_jobs=64, num_in_flight=0, max_in_flight=100)).jobs

    assert [row.job_id for row in rows] == ids[:64]
    assert redis.zscore(store.Keys.fair_share("demo"), "alice") == 64


def test_all_jobs_of_a_single_owner_go_onto_the_list_of_rq(redis: Redis, redis_url: str):
    server = Api(redis_url, "alice", batch=BATCH)
    server.submit("alice", 20)
    server.close()
    assert redis.llen("rq:queue:demo") == 20
    assert redis.keys("scorepool:turns:*") == []


def test_a_job_in_the_backlog_is_deferred_in_rq_and_can_be_canceled(shared: Api, redis: Redis):
    ids = shared.submit("alice", 70)
    assert (status(redis, ids[63]), status(redis, ids[64])) == ("queued", "deferred")
    shared.cancel("alice", ids[64])

    assert status(redis, ids[64]) == "canceled"
    assert redis.zcard("rq:deferred:demo") == 5
    assert redis.llen("rq:queue:demo") == 64
    leases = Leases(redis, "mac", "rq:worker:mac", 60.0)
    claim = Claim(max_jobs=100, num_in_flight=0, max_in_flight=100)
    rows = leases.claim([Queue("demo", connection=redis)], claim).jobs
    assert [row.job_id for row in rows] == [*ids[:64], *ids[65:]]


def test_rq_info_counts_jobs_in_the_backlog(shared: Api, workers: Workers):
    shared.submit("alice", 70)
    shared.submit("bob", 3)
    assert " 73, 0 executing" in workers.rq("info", "-Q", "--queue-class", "scorepool.worker.Queue")


def test_jobs_in_the_backlog_are_served_after_another_tool_deleted_the_list_of_rq(
    shared: Api, redis: Redis, workers: Workers
):
    ids = shared.submit("alice", 70)
    redis.delete("rq:queue:demo")

    workers.start("--burst").wait(timeout=60)

    assert done(redis) == ids[64:]


def test_a_queue_filled_by_one_owner_accepts_a_batch_from_another(redis: Redis, redis_url: str):
    server = Api(redis_url, "alice", "bob", batch=BATCH, max_depth=20)
    server.submit("alice", 20)
    with pytest.raises(QueueFull):
        server.submit("alice")
    server.submit("bob", BATCH)
    with pytest.raises(QueueFull):
        server.submit("bob")
    server.close()


def test_many_jobs_of_one_owner_delay_a_single_job_of_another_by_at_most_a_batch(
    shared: Api, redis: Redis, workers: Workers
):
    shared.submit("alice", 2000)
    workers.start(FAKE_STEP_S="0.02", SCOREPOOL_MAX_JOBS_IN_FLIGHT="64")
    until(lambda: len(done(redis)) >= 200)
    (single,) = shared.submit("bob")
    num_before = len(done(redis))
    until(lambda: single in done(redis))

    in_flight, on_list, turn = 64, 64, 2
    assert done(redis).index(single) - num_before <= in_flight + on_list + turn


def test_jobs_that_are_postponed_again_and_again_leave_a_job_of_another_owner_its_turn(shared: Api, redis: Redis):
    shared.submit("alice", 500)
    queue, leases = Queue("demo", connection=redis), Leases(redis, "mac", "rq:worker:mac", 60.0)

    def claim_and_postpone() -> list[str]:
        rows = leases.claim([queue], Claim(max_jobs=32, num_in_flight=0, max_in_flight=100)).jobs
        for row in rows:
            redis.zrem("rq:wip:demo", row.lease_key)
            redis.hset(f"rq:job:{row.job_id}", "status", "scheduled")
            redis.zadd("rq:scheduled:demo", {row.job_id: 0})
        redis.eval(load("enqueue_due.lua"), 0, "demo")
        return [row.job_id for row in rows]

    for _ in range(20):
        claim_and_postpone()
    assert redis.llen("rq:queue:demo") <= 64
    (single,) = shared.submit("bob")

    assert single in [job_id for _ in range(3) for job_id in claim_and_postpone()]
    assert redis.llen("rq:queue:demo") + redis.zcard("rq:deferred:demo") == 501  # none is lost


def test_no_owner_loses_a_job_when_workers_are_killed(shared: Api, redis: Redis, workers: Workers):
    alices, bobs = shared.submit("alice", 600), shared.submit("bob", 600)
    for num_done in (100, 300, 500):
        victim = workers.start(FAKE_STEP_S="0.02", SCOREPOOL_CRASH_LIMIT="99")
        until(lambda num_done=num_done: len(done(redis)) >= num_done)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    workers.start("--burst", SCOREPOOL_CRASH_LIMIT="99").wait(timeout=60)

    assert sorted(done(redis)) == sorted([*alices, *bobs])  # each job ended exactly once
    assert {status(redis, id_) for id_ in [*alices, *bobs]} == {"finished"}
    assert redis.keys("scorepool:backlog:*") + redis.keys("scorepool:turns:*") + redis.keys("rq:deferred:*") == []


def test_a_list_full_of_suspects_hides_no_backlog(redis: Redis, shared: Api):
    """The others' jobs do not wait until all jobs of a dead worker have run alone."""
    for job_id in shared.submit("alice", 64):
        redis.hset(f"rq:job:{job_id}", JobField.MAX_CONCURRENCY, 1)
    behind = shared.submit("bob", 40)
    queue = Queue("demo", connection=redis)

    def claim(name: str, num_in_flight: int) -> list[str]:
        leases = Leases(redis, name, f"rq:worker:{name}", 60.0)
        wanted = Claim(max_jobs=40, num_in_flight=num_in_flight, max_in_flight=64, list_length=64)
        return [row.job_id for row in leases.claim([queue], wanted).jobs]

    assert claim("draining", num_in_flight=1) == []
    assert claim("busy", num_in_flight=1) == behind
