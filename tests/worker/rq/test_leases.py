"""The scripts that lease jobs, called without a worker."""

from datetime import UTC, datetime
from urllib.parse import urlsplit

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from rq.utils import utcformat

from scorepool import wire
from scorepool.store import JobField
from scorepool.store.scripts import load
from scorepool.worker import Queue
from scorepool.worker.rq.leases import ClaimedJob, Leases
from scorepool.worker.rq.process import WorkerProcess
from tests.worker.conftest import generate, status, submit


@pytest.fixture
def queue(redis: Redis) -> Queue:
    return Queue("demo", connection=redis)


def leases(redis: Redis, name: str = "mac", lease_s: float = 60.0) -> Leases:
    return Leases(redis, name, f"rq:worker:{name}", lease_s)


def claim(
    redis: Redis, queue: Queue, max_jobs: int = 32, in_flight: int = 0, max_in_flight: int = 32
) -> list[ClaimedJob]:
    rows = leases(redis).claim([queue], max_jobs, in_flight, max_in_flight, list_length=32, round_robin=False)
    assert rows is not None
    return rows


def test_a_claim_returns_jobs_with_their_requests_in_queue_order(redis: Redis, queue: Queue):
    ids = [submit(redis, generate(f"prompt {i}")) for i in range(5)]

    rows = claim(redis, queue, max_jobs=3)

    assert [row.job_id for row in rows] == ids[:3]
    assert [wire.decode_request(row.request or b"").prompt for row in rows] == ["prompt 0", "prompt 1", "prompt 2"]  # type: ignore[union-attr]
    assert [status(redis, job_id) for job_id in ids] == ["started"] * 3 + ["queued"] * 2


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


def expire_leases(redis: Redis, rows: list[ClaimedJob]) -> None:
    """Expire the leases of a dead worker, and let the next worker reclaim its jobs."""
    for row in rows:
        redis.delete(f"rq:execution:{row.job_id}:{row.execution_id}")


def test_a_shared_death_halves_max_concurrency_and_only_a_death_alone_counts_as_a_crash(redis: Redis, queue: Queue):
    ids = [submit(redis, generate()) for _ in range(9)]
    seen = []
    while True:
        rows = claim(redis, queue)
        expire_leases(redis, rows)
        _, to_end = leases(redis, "other").reclaim([queue], crash_limit=2)
        if to_end:
            break
        first = redis.hmget(f"rq:job:{rows[0].job_id}", JobField.MAX_CONCURRENCY, "crashes")
        seen.append((len(rows), *first))

    assert seen == [(9, b"4", None), (4, b"2", None), (2, b"1", None), (1, b"1", b"1")]
    assert [row.fields[b"crashes"] for row in to_end] == [b"2"]
    assert sorted(i.decode() for i in redis.lrange(queue.key, 0, -1)) == sorted(set(ids) - {to_end[0].job_id})


def test_jobs_of_one_death_share_it_even_if_their_leases_expire_one_by_one(redis: Redis, queue: Queue):
    first, second = [submit(redis, generate()) for _ in range(2)]
    rows = claim(redis, queue)

    for row in rows:
        expire_leases(redis, [row])
        leases(redis, "other").reclaim([queue], crash_limit=1)

    assert redis.hmget(f"rq:job:{first}", JobField.MAX_CONCURRENCY, "crashes") == [b"1", None]
    assert redis.hmget(f"rq:job:{second}", JobField.MAX_CONCURRENCY, "crashes") == [b"1", None]


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
    assert redis.hmget(f"rq:job:{first}", JobField.MAX_CONCURRENCY, "retries_left") == [b"1", b"3"]


def test_a_job_with_a_live_lease_is_not_reclaimed(redis: Redis, queue: Queue):
    job_id = submit(redis, generate())
    claim(redis, queue)

    assert leases(redis, "other").reclaim([queue], crash_limit=5) == (0, [])
    assert status(redis, job_id) == "started"


def test_a_repeated_claim_returns_the_jobs_of_the_lost_answer(redis: Redis, queue: Queue):
    """Redis's clock is set back by an hour between the calls, so the leases still have an hour to live."""
    ids = [submit(redis, generate(f"prompt {i}")) for i in range(3)]
    held = leases(redis)
    script = held._claim._script

    def lose_the_answer(**arguments: object) -> object:
        script(**arguments)  # type: ignore[arg-type]
        raise RedisConnectionError("the connection was closed")

    held._claim._script = lose_the_answer  # type: ignore[assignment]
    with pytest.raises(RedisConnectionError):
        held.claim([queue], 2, 0, 32, 32, round_robin=False)
    held._claim._script = script
    for key in redis.scan_iter("rq:execution:*"):
        redis.expire(key, 3600)

    repeated = held.claim([queue], 2, 0, 32, 32, round_robin=False)
    rest = held.claim([queue], 2, 0, 32, 32, round_robin=False)

    assert repeated is not None
    assert rest is not None
    assert [row.job_id for row in repeated] == ids[:2]
    assert all(row.request is not None for row in repeated)
    assert [row.job_id for row in rest] == ids[2:]
    assert redis.zcard("rq:wip:demo") == 3


def test_the_redis_client_of_a_worker_does_not_retry_commands(redis_url: str):
    """The worker must know when a claim is repeated. A client made without a URL (REDIS_HOST) retries by default."""
    with Redis(unix_socket_path=urlsplit(redis_url).path) as connection:
        worker = WorkerProcess(["demo"], connection=connection)
        assert worker.connection.connection_pool.get_connection().retry.get_retries() == 0


def test_a_repeated_claim_does_not_return_a_job_that_was_reclaimed(redis: Redis, queue: Queue):
    submit(redis, generate())
    first = leases(redis)
    [row] = first.claim([queue], 1, 0, 32, 32, round_robin=False) or []
    first._claim._id = row.execution_id[:24]  # as if the claim's answer had been lost
    first.expire([f"{row.job_id}:{row.execution_id}"])
    assert Leases(redis, "other", "rq:worker:other", 10).reclaim([queue], 5)[0] == 1
    other = Leases(redis, "other", "rq:worker:other", 10).claim([queue], 1, 0, 32, 32, round_robin=False)

    assert other is not None
    assert [taken.job_id for taken in other] == [row.job_id]
    assert first.claim([queue], 1, 0, 32, 32, round_robin=False) == []


@pytest.mark.parametrize("unix_s", [0.0, 951_782_400.5, 1_709_164_800.25, 1_735_689_599.75, 4_107_542_400.0])
def test_lua_writes_times_as_rq_does(redis: Redis, unix_s: float):
    script = f"{load('lease.lua')}\nreturn iso_time(tonumber(ARGV[1]))"
    assert redis.eval(script, 0, unix_s).decode() == utcformat(datetime.fromtimestamp(unix_s, UTC))
