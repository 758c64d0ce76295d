"""The scripts that lease jobs, called without a worker."""

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis import Redis
from rq.utils import utcformat

from scorepool import store, wire
from scorepool.store import JobField
from scorepool.store.scripts import load
from scorepool.worker import Queue
from scorepool.worker.claims.leases import Claim, ClaimedJob, Leases
from scorepool.worker.rq.process import WorkerProcess
from tests.worker.conftest import generate, status, submit


@pytest.fixture
def queue(redis: Redis) -> Queue:
    return Queue("demo", connection=redis)


def leases(redis: Redis, name: str = "mac", lease_s: float = 60.0) -> Leases:
    return Leases(redis, name, f"rq:worker:{name}", lease_s)


def ask(held: Leases, queue: Queue, max_jobs: int = 32, **options: Any) -> list[ClaimedJob]:
    wanted = {"max_jobs": max_jobs, "num_in_flight": 0, "max_in_flight": 32, "list_length": 32, **options}
    return held.claim([queue], Claim(**wanted)).jobs


def claim(
    redis: Redis, queue: Queue, max_jobs: int = 32, in_flight: int = 0, max_in_flight: int = 32
) -> list[ClaimedJob]:
    return ask(leases(redis), queue, max_jobs, num_in_flight=in_flight, max_in_flight=max_in_flight)


def test_a_claim_returns_jobs_with_their_requests_in_queue_order(redis: Redis, queue: Queue):
    ids = [submit(redis, generate(f"prompt {i}")) for i in range(5)]

    rows = claim(redis, queue, max_jobs=3)

    assert [row.job_id for row in rows] == ids[:3]
    assert [wire.decode_request(row.request or b"").prompt for row in rows] == ["prompt 0", "prompt 1", "prompt 2"]  # type: ignore[union-attr]
    assert [status(redis, job_id) for job_id in ids] == ["started"] * 3 + ["queued"] * 2


def test_a_pause_leases_no_jobs_of_models_and_deliveries_of_webhooks(redis: Redis, queue: Queue):
    job_id = submit(redis, generate())
    webhooks = Queue(store.WEBHOOKS, connection=redis)
    redis.hset("rq:job:wh_a", mapping={"status": "queued", "data": "[]", "origin": store.WEBHOOKS})
    redis.rpush(webhooks.key, "wh_a")
    redis.set(store.Keys.paused, "1")

    wanted = Claim(max_jobs=4, num_in_flight=0, max_in_flight=4)
    assert leases(redis).claim([queue], wanted).is_suspended
    assert [row.job_id for row in ask(leases(redis, "hooks"), webhooks)] == ["wh_a"]

    redis.delete(store.Keys.paused)
    assert [row.job_id for row in claim(redis, queue)] == [job_id]


@pytest.mark.parametrize(
    ("max_concurrency", "others", "taken"),
    [(None, 20, 12), (8, 0, 8), (8, 7, 1), (8, 8, 0), (1, 0, 1), (1, 1, 0), (0, 0, 1)],
)
def test_a_claim_respects_the_max_concurrency_of_quarantined_jobs(
    redis: Redis, queue: Queue, max_concurrency: int | None, others: int, taken: int
):
    for _ in range(12):
        submit(redis, generate(), fields={} if max_concurrency is None else {JobField.MAX_CONCURRENCY: max_concurrency})

    assert len(claim(redis, queue, in_flight=others)) == taken


@pytest.mark.parametrize("owners", [("",), ("ann", "bob")])
def test_one_worker_drains_for_a_suspect_and_the_others_claim_the_jobs_behind_it(
    redis: Redis, queue: Queue, owners: tuple[str, ...]
):
    suspects = [submit(redis, generate(), fields={JobField.MAX_CONCURRENCY: 1}) for _ in range(3)]
    others = [submit(redis, generate(), fields={JobField.OWNER: owners[i % len(owners)]}) for i in range(6)]
    first, second, third = (leases(redis, name) for name in ("first", "second", "third"))
    excluded = ["cay"] if len(owners) > 1 else []  # an owner is left out, so the others take turns

    def ids(held: Leases, num_in_flight: int) -> list[str]:
        rows = ask(held, queue, 2, num_in_flight=num_in_flight, excluded=excluded)
        return [row.job_id for row in rows]

    assert ids(first, num_in_flight=2) == []
    assert set(ids(second, num_in_flight=2)) == set(others[:2])
    assert set(ids(third, num_in_flight=1)) == set(others[2:4])
    assert ids(first, num_in_flight=1) == []
    assert ids(first, num_in_flight=0) == suspects[:1]  # one, because nothing may run beside it
    assert set(ids(second, num_in_flight=4)) == set(others[4:])  # nor does another worker drain for the next suspect
    assert ids(third, num_in_flight=0) == suspects[1:2]  # it has nothing to drain
    assert 0 < redis.pttl(store.Keys.draining_worker("demo")) <= 60_000
    redis.delete(store.Keys.draining_worker("demo"))  # as when the first one falls silent
    assert ids(second, num_in_flight=1) == []
    assert ids(second, num_in_flight=0) == suspects[2:]


def test_a_worker_that_drains_for_a_suspect_claims_nothing_of_its_other_model(redis: Redis, queue: Queue):
    other_queue = Queue("other", connection=redis)
    suspect = submit(redis, generate(), fields={JobField.MAX_CONCURRENCY: 1})
    others = [submit(redis, generate(), queue="other") for _ in range(2)]
    both = leases(redis, "both")

    assert ask(both, Queue("empty", connection=redis), waits=True, num_startable=9) == []
    assert redis.hget("rq:worker:both", "waits_with")  # jobs that are submitted are sent to it

    assert ask(both, queue, num_in_flight=0, num_elsewhere=1) == []
    assert ask(both, other_queue, num_in_flight=1) == []
    assert not redis.hget("rq:worker:both", "waits_with")
    assert [row.job_id for row in ask(leases(redis, "second"), other_queue, 1)] == others[:1]
    assert [row.job_id for row in ask(both, queue)] == [suspect]
    time.sleep(2.6)  # it has no more suspects to run
    assert [row.job_id for row in ask(both, other_queue, num_in_flight=1)] == others[1:]


def test_a_worker_that_passes_a_suspect_over_waits_for_the_next_job(redis: Redis, queue: Queue):
    submit(redis, generate(), fields={JobField.MAX_CONCURRENCY: 1})
    assert ask(leases(redis, "first"), queue, num_in_flight=2, waits=True) == []
    assert ask(leases(redis, "second"), queue, num_in_flight=2, waits=True) == []

    assert [redis.zscore(store.Keys.waiting_workers("demo"), name) is not None for name in ("first", "second")] == [
        False,
        True,
    ]


def test_jobs_behind_many_suspects_are_found_beside_jobs_of_another_queue(redis: Redis, queue: Queue):
    for _ in range(40):
        submit(redis, generate(), fields={JobField.MAX_CONCURRENCY: 1, JobField.OWNER: "ann"})
    bobs = submit(redis, generate(), fields={JobField.OWNER: "bob"})
    high = [submit(redis, generate(), queue="demo:high", fields={JobField.OWNER: "cay"}) for _ in range(2)]
    queues = [Queue("demo:high", connection=redis), queue]
    assert ask(leases(redis, "first"), queue, num_in_flight=2) == []

    wanted = Claim(max_jobs=2, num_in_flight=2, max_in_flight=32, list_length=32)
    rows = leases(redis, "second").claim(queues, wanted).jobs

    assert {row.job_id for row in rows} == {bobs, high[0]}


def keys(rows: list[ClaimedJob]) -> list[str]:
    return [f"{row.job_id}:{row.execution_id}" for row in rows]


def expire_leases(redis: Redis, rows: list[ClaimedJob]) -> None:
    for key in keys(rows):
        redis.delete(f"rq:execution:{key}")


def test_a_shared_death_halves_max_concurrency_and_only_a_death_alone_counts_as_a_crash(redis: Redis, queue: Queue):
    ids = [submit(redis, generate()) for _ in range(9)]
    seen = []
    while True:
        rows = claim(redis, queue)
        _, to_end = leases(redis, "other").reclaim([queue], 2, keys(rows))
        if to_end:
            break
        first = redis.hmget(f"rq:job:{rows[0].job_id}", JobField.MAX_CONCURRENCY, "crashes")
        seen.append((len(rows), *first))

    assert seen == [(9, b"4", None), (4, b"2", None), (2, b"1", None), (1, b"1", b"1")]
    assert [row.fields[b"crashes"] for row in to_end] == [b"2"]
    assert sorted(i.decode() for i in redis.lrange(queue.key, 0, -1)) == sorted(set(ids) - {to_end[0].job_id})


def test_the_silence_of_a_worker_says_nothing_about_its_jobs(redis: Redis, queue: Queue):
    """A worker that sleeps, or is cut off, looks like one that was killed on a machine where nobody sees it."""
    ids = [submit(redis, generate()) for _ in range(3)]
    for _ in range(12):
        expire_leases(redis, claim(redis, queue))
        assert leases(redis, "other").reclaim([queue], crash_limit=1) == (3, [])

    assert [redis.hmget(f"rq:job:{id_}", JobField.MAX_CONCURRENCY, "crashes") for id_ in ids] == [[None, None]] * 3
    assert len(claim(redis, queue)) == 3


def test_the_death_of_one_worker_ends_no_leases_of_others(redis: Redis, queue: Queue):
    """They may be over because Redis was away."""
    for _ in range(2):
        submit(redis, generate())
    dead, silent = (ask(leases(redis, name), queue, 1) for name in ("dead", "silent"))
    expire_leases(redis, dead + silent)

    assert leases(redis, "other").reclaim([queue], 5, keys(dead))[0] == 1
    assert status(redis, silent[0].job_id) == "started"
    assert leases(redis, "other").reclaim([queue], 5)[0] == 1


def test_the_leases_of_a_dead_worker_need_not_expire(redis: Redis, queue: Queue):
    for _ in range(2):
        submit(redis, generate())
    dead = claim(redis, queue)

    assert leases(redis, "other").reclaim([queue], 5, keys(dead)) == (2, [])
    assert redis.llen("rq:queue:demo") == 2
    assert len(claim(redis, queue)) == 1  # each of the two may have killed the worker, so it runs alone


def test_a_claim_is_bounded_in_bytes(redis: Redis, queue: Queue):
    for _ in range(3):
        submit(redis, bytes(40 * 2**20))

    assert [len(claim(redis, queue)), len(claim(redis, queue))] == [2, 1]


def test_a_job_whose_lease_expired_goes_back_to_the_front_of_its_queue(redis: Redis, queue: Queue):
    first, second = submit(redis, generate()), submit(redis, generate())
    (row,) = claim(redis, queue, max_jobs=1)
    redis.delete(f"rq:execution:{row.job_id}:{row.execution_id}")  # as when the lease expires

    num_back, to_end = leases(redis, "other").reclaim([queue], crash_limit=5)

    assert (num_back, to_end) == (1, [])
    assert [i.decode() for i in redis.lrange(queue.key, 0, -1)] == [first, second]
    assert redis.hmget(f"rq:job:{first}", JobField.MAX_CONCURRENCY, "retries_left") == [None, b"3"]


def test_a_job_with_a_live_lease_is_not_reclaimed(redis: Redis, queue: Queue):
    job_id = submit(redis, generate())
    claim(redis, queue)

    assert leases(redis, "other").reclaim([queue], crash_limit=5) == (0, [])
    assert status(redis, job_id) == "started"


def test_a_claim_after_a_lost_reply_returns_the_jobs_that_its_worker_does_not_know(redis: Redis, queue: Queue):
    ids = [submit(redis, generate(f"prompt {i}")) for i in range(5)]
    held = leases(redis)
    known = ask(held, queue, 1)
    ask(held, queue, 2)  # the reply is lost

    repeated = ask(held, queue, 1, known=keys(known), num_in_flight=1)
    rest = ask(held, queue, 2)

    assert [row.job_id for row in repeated] == [ids[1], ids[2]]  # more than it asked for, so no others
    assert all(row.request is not None for row in repeated)
    assert [row.job_id for row in rest] == ids[3:]
    assert redis.zcard("rq:wip:demo") == 5


def test_a_claim_that_is_delivered_after_a_later_one_leases_nothing(redis: Redis, queue: Queue):
    for _ in range(3):
        submit(redis, generate())
    held = leases(redis)
    late = held.claim_arguments([queue], Claim(max_jobs=1, num_in_flight=0, max_in_flight=32))
    assert len(ask(held, queue, 1)) == 1

    assert held.read_claim([queue], held.claim_script(*late)).jobs == []
    assert redis.zcard("rq:wip:demo") == 1
    assert len(ask(held, queue, 1)) == 1


def test_the_redis_client_of_a_worker_does_not_retry_commands(redis_url: str):
    """The worker must know when a claim is repeated. A client made without a URL (REDIS_HOST) retries by default."""
    with Redis(unix_socket_path=urlsplit(redis_url).path) as connection:
        worker = WorkerProcess(["demo"], connection=connection)
        assert worker.connection.connection_pool.get_connection().retry.get_retries() == 0


def test_a_claim_after_a_lost_reply_does_not_return_a_job_that_was_reclaimed(redis: Redis, queue: Queue):
    submit(redis, generate())
    first, other = leases(redis), leases(redis, "other")
    rows = ask(first, queue)
    expire_leases(redis, rows)
    assert other.reclaim([queue], 5)[0] == 1

    assert [row.job_id for row in ask(other, queue)] == [row.job_id for row in rows]
    assert ask(first, queue, known=[]) == []


def test_an_idle_worker_takes_the_last_jobs_that_another_has_not_begun(redis: Redis, queue: Queue):
    ids = [submit(redis, generate()) for _ in range(4)]
    slow, idle = leases(redis, "slow"), leases(redis, "idle")
    rows = ask(slow, queue)
    ask(slow, queue, 0, begun=keys(rows)[:2])
    assert ask(idle, queue, max_taken_over=32) == []  # the slow one has had no time to begin with them
    age(redis, rows)

    assert [row.job_id for row in ask(idle, queue, 1, max_taken_over=32)] == ids[3:]
    assert [row.job_id for row in ask(idle, queue, max_taken_over=32)] == ids[2:3]
    assert ask(idle, queue, max_taken_over=32) == []
    assert slow.extend([InFlight(queue, key) for key in keys(rows)])[0] == set(keys(rows)[2:])


def test_a_job_is_taken_over_once(redis: Redis, queue: Queue):
    submit(redis, generate())
    age(redis, ask(leases(redis, "slow"), queue))
    rows = ask(leases(redis, "idle"), queue, max_taken_over=32)
    assert len(rows) == 1
    age(redis, rows)

    assert ask(leases(redis, "slow"), queue, max_taken_over=32) == []


def test_a_worker_with_free_rows_takes_over_jobs_unless_it_runs_a_suspect(redis: Redis, queue: Queue):
    for _ in range(2):
        submit(redis, generate())
    age(redis, ask(leases(redis, "asleep"), queue))
    busy = leases(redis, "busy")

    assert ask(busy, queue, max_taken_over=32, num_in_flight=1, max_in_flight=1) == []
    assert len(ask(busy, queue, max_taken_over=32, num_in_flight=1)) == 2


def test_a_job_of_a_worker_of_an_older_version_is_not_taken_over(redis: Redis, queue: Queue):
    submit(redis, generate())
    rows = ask(leases(redis, "old"), queue)
    age(redis, rows)
    redis.hdel(f"rq:execution:{keys(rows)[0]}", "begun")  # as an older version leases it

    assert ask(leases(redis, "idle"), queue, max_taken_over=32) == []


@dataclass
class InFlight:
    queue: Queue
    lease_key: str


def age(redis: Redis, rows: list[ClaimedJob]) -> None:
    for key in keys(rows):
        redis.hincrbyfloat(f"rq:execution:{key}", "created_at", -10)


@pytest.mark.parametrize(
    ("speeds", "waiting", "claimed"),
    [
        ({"mac": 10.0, "slow": 1.0}, 11, 10),
        ({"slow": 10.0, "mac": 1.0}, 11, 1),
        ({"slow": 10.0, "mac": 1.0}, 4, 0),  # the faster one ends all four before this one would end the first
        ({"slow": 10.0, "mac": None}, 10, 5),
        ({"a": 1.0, "b": 1.0, "mac": 1.0}, 10, 4),  # a job is not divided
        ({"a": 1.0, "b": 1.01, "mac": 0.99}, 3, 1),
        ({"mac": 1.0}, 11, 11),
        ({"slow": 10.0, "mac": 1.0}, 1100, 32),
    ],
)
def test_a_worker_gets_its_share_of_what_waits_by_speed(
    redis: Redis, queue: Queue, speeds: dict[str, float | None], waiting: int, claimed: int
):
    for name, speed in speeds.items():
        ask(leases(redis, name), queue, 0, speed=speed, writes_speed=True)
    for _ in range(waiting):
        submit(redis, generate())

    assert len(ask(leases(redis), queue)) == claimed
    if claimed == 0:
        assert len(ask(leases(redis), queue, 1, exceeds_share=True)) == 1


def test_a_silent_worker_has_no_share(redis: Redis, queue: Queue):
    ask(leases(redis, "asleep"), queue, 0, speed=10.0, writes_speed=True)
    ask(leases(redis), queue, 0, speed=1.0, writes_speed=True)
    redis.hset(store.Keys.speeds("demo"), "asleep", f"10:{time.time() - 60:.3f}")
    for _ in range(4):
        submit(redis, generate())

    assert len(ask(leases(redis), queue)) == 4


@pytest.mark.parametrize("unix_s", [0.0, 951_782_400.5, 1_709_164_800.25, 1_735_689_599.75, 4_107_542_400.0])
def test_lua_writes_times_as_rq_does(redis: Redis, unix_s: float):
    script = f"{load('lease.lua')}\nreturn iso_time(tonumber(ARGV[1]))"
    assert redis.eval(script, 0, unix_s).decode() == utcformat(datetime.fromtimestamp(unix_s, UTC))
