"""Measure what a fleet costs Redis: CPU seconds of its main thread by message, as workers and the API send them."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging import getLogger
from typing import Any
from uuid import uuid4

import msgspec
import redis.asyncio
from redis import Redis
from rq.timeouts import UnixSignalDeathPenalty

from scorepool import store, wire
from scorepool.api.auth import Keyring
from scorepool.api.http.large_replies import own_results
from scorepool.api.repositories.jobs import Jobs
from scorepool.api.repositories.queue import Queue as ApiQueue
from scorepool.api.repositories.stored_results import StoredResults
from scorepool.worker import Queue
from scorepool.worker.claims.leases import Claim, Leases
from scorepool.worker.inference.token_publisher import APPEND_DELTAS, MAX_STREAM_LENGTH
from scorepool.worker.rq.commit import ResultCommitter
from scorepool.worker.rq.in_flight import InFlightJob
from tests.fleet.fleet import MODEL, generate

NUM_JOBS = 1536  # of a measurement
BATCHES = (1, 32)  # jobs of a message, from which a fixed cost and one per job follow
NUM_WORKERS = (1000, 10_000)  # that are registered while costs by workers are measured
NUM_LEASES, NUM_FEW_LEASES = 4000, 1000  # in flight while costs by leases are measured
BASE_S = 3.0  # for which the server is left alone
NUM_TOKENS = 64  # of a result
OWNER = "fleet"


class Costs(msgspec.Struct, kw_only=True):
    """CPU seconds of Redis's main thread, and the time of a small exchange."""

    rtt_s: float
    base: float  # a second without any message
    submit: float  # a job
    read: float  # a job with its result, by the client that waited
    claim: float  # a claim
    claim_job: float  # more, for each job that it leases
    share_worker: float  # more, for each worker, if the queue is not deep: shares are computed
    take_over_lease: float  # more of an idle worker's claim, for each lease, 500 at most
    finish: float  # a message that ends jobs
    finish_job: float  # more, for each job
    beat: float  # a heartbeat
    beat_job: float  # more, for each job in flight
    reclaim: float  # a search for silent workers
    reclaim_lease: float  # more, for each lease of all workers
    tokens: float  # a write of new tokens
    tokens_row: float  # more, for each sequence


class Meter:
    """CPU seconds of a server's main thread."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    def read_s(self) -> float:
        cpu = self._connection.info("cpu")
        return float(cpu["used_cpu_sys_main_thread"] + cpu["used_cpu_user_main_thread"])

    def of(self, call: Callable[[], object], count: int = 1) -> float:
        """Return the CPU seconds of one of `count` calls."""
        before = self.read_s()
        for _ in range(count):
            call()
        return (self.read_s() - before) / count


def measure(connection: Redis) -> Costs:
    """Measure on an empty server, which is emptied again."""
    meter = Meter(connection)
    connection.flushall()
    submit = meter.of(lambda: submit_jobs(connection, NUM_JOBS)) / NUM_JOBS
    claims: dict[int, float] = {}
    finishes: dict[int, float] = {}
    ended: list[str] = []
    for size in BATCHES:
        connection.flushall()
        submit_jobs(connection, NUM_JOBS)
        claims[size], finishes[size], ended = _claim_and_finish(connection, meter, size)
    read = meter.of(lambda: asyncio.run(_read_all(connection, ended))) / len(ended)
    claim, claim_job = _fixed_and_each(claims)
    finish, finish_job = _fixed_and_each(finishes)
    by_leases = _by_leases(connection, meter)
    tokens, tokens_row = _fixed_and_each({size: _tokens(connection, meter, size) for size in BATCHES})
    found = Costs(
        rtt_s=_rtt_s(connection),
        base=meter.of(lambda: time.sleep(BASE_S)) / BASE_S,
        submit=submit,
        read=read,
        claim=claim,
        claim_job=claim_job,
        share_worker=_share_by_worker(connection, meter),
        finish=finish,
        finish_job=finish_job,
        tokens=tokens,
        tokens_row=tokens_row,
        **by_leases,
    )
    connection.flushall()
    return found


def submit_jobs(connection: Redis, count: int) -> None:
    """Submit jobs one by one, as an API process does for as many clients."""

    async def submit() -> None:
        async with redis.asyncio.Redis.from_pool(_async_pool(connection)) as client:
            queue = ApiQueue(client, store.Settings(max_queue_depth=10**7), Keyring([]).weight, False)
            for _ in range(count):
                await queue.submit(OWNER, [generate(NUM_TOKENS)], [uuid4().hex])

    asyncio.run(submit())


def _async_pool(connection: Redis) -> redis.asyncio.ConnectionPool:
    options = connection.connection_pool.connection_kwargs
    kind = redis.asyncio.UnixDomainSocketConnection if "path" in options else redis.asyncio.Connection
    wanted = {name: options[name] for name in ("path", "host", "port") if name in options}
    return redis.asyncio.ConnectionPool(connection_class=kind, max_connections=1, **wanted)


def _leases(connection: Redis, name: str = "mac") -> Leases:
    return Leases(connection, name, store.RqKeys.worker(name), 60.0)


def _queues(connection: Redis) -> list[Queue]:
    """Return the queues of a model, one of each priority."""
    return [Queue(name, connection=connection) for name in store.queue_names(MODEL)]


def _claim(leases: Leases, connection: Redis, size: int, **options: Any) -> list[InFlightJob]:
    claim = Claim(max_jobs=size, num_in_flight=0, max_in_flight=10**6, list_length=10**6, max_bytes=10**9, **options)
    rows = leases.claim(_queues(connection), claim).jobs
    return [InFlightJob.from_claimed(row, connection, "mac", {}) for row in rows]


def _claim_and_finish(connection: Redis, meter: Meter, size: int) -> tuple[float, float, list[str]]:
    """Claim all jobs and end them, `size` at a time. Return the costs of one claim and one end, and the jobs' ids."""
    leases = _leases(connection)
    committer = ResultCommitter(connection, leases, 500, UnixSignalDeathPenalty, lambda *_: None, getLogger("bench"))
    groups: list[list[InFlightJob]] = []
    count = NUM_JOBS // size
    claim = meter.of(lambda: groups.append(_claim(leases, connection, size)), count)
    for inflight in (one for group in groups for one in group):
        inflight.succeed(result())
    left = iter(groups)
    finish = meter.of(lambda: committer.commit(next(left), None), count)
    return claim, finish, [inflight.job.id for group in groups for inflight in group]


def result() -> wire.Result:
    """Return a result of NUM_TOKENS tokens."""
    numbers = random.Random(1)
    sequence = wire.SequenceResult(
        token_ids=[numbers.randrange(100_000) for _ in range(NUM_TOKENS)],
        token_bytes=[b"word"] * NUM_TOKENS,
        text="word" * NUM_TOKENS,
        logprobs=wire.Floats(numbers.uniform(-9, 0) for _ in range(NUM_TOKENS)),
    )
    stamp = wire.Provenance(
        model=MODEL, fingerprint="f", dtype="", quantization=None, adapter=None, mode="", backend="", versions={}
    )
    usage = wire.Usage(prompt_tokens=NUM_TOKENS, completion_tokens=NUM_TOKENS)
    return wire.Result(sequences=[sequence], temperature=1.0, usage=usage, stamp=stamp)


async def _read_all(connection: Redis, job_ids: Sequence[str]) -> None:
    async with redis.asyncio.Redis.from_pool(_async_pool(connection)) as client:
        jobs = Jobs(client, StoredResults(client, None))
        for job_id in job_ids:
            with own_results(OWNER) as held:
                await jobs.read(OWNER, job_id, held)


def _by_leases(connection: Redis, meter: Meter) -> dict[str, float]:
    """Measure what grows with the leases of all workers, and heartbeats."""
    with _fleet_in_flight(connection) as (leases, held):
        queues = _queues(connection)
        beats = {size: meter.of(lambda size=size: leases.extend(held[:size]), 100) for size in BATCHES}  # type: ignore[misc]
        beat, beat_job = _fixed_and_each(beats)
        idle = _leases(connection, "idle")
        plain = meter.of(lambda: _claim(idle, connection, 0), 50)
        looking = meter.of(lambda: _claim(idle, connection, 1, max_taken_over=1), 50)
        reclaim_many = meter.of(lambda: leases.reclaim(queues, 5), 20)
        leases.release(held[NUM_FEW_LEASES:])
        reclaim_few = meter.of(lambda: leases.reclaim(queues, 5), 20)
    reclaim_lease = max(0.0, reclaim_many - reclaim_few) / (NUM_LEASES - NUM_FEW_LEASES)
    return {
        "beat": beat + _registration(connection, meter),
        "beat_job": beat_job,
        "reclaim": max(0.0, reclaim_few - reclaim_lease * NUM_FEW_LEASES),
        "reclaim_lease": reclaim_lease,
        "take_over_lease": max(0.0, looking - plain) / 500,
    }


@contextmanager
def _fleet_in_flight(connection: Redis) -> Iterator[tuple[Leases, list[InFlightJob]]]:
    """Give a worker with NUM_LEASES jobs in flight, all of which have begun."""
    connection.flushall()
    submit_jobs(connection, NUM_LEASES)
    leases = _leases(connection)
    held = _claim(leases, connection, NUM_LEASES)
    _claim(leases, connection, 0, begun=[inflight.lease_key for inflight in held])
    yield leases, held
    connection.flushall()


def _registration(connection: Redis, meter: Meter) -> float:
    """Measure what a heartbeat writes beside leases: the worker's own keys."""

    def write() -> None:
        with connection.pipeline() as pipeline:
            pipeline.hset(store.RqKeys.worker("mac"), mapping={"last_heartbeat": "2026-01-01T00:00:00Z"})
            pipeline.expire(store.RqKeys.worker("mac"), 60)
            pipeline.set(store.Keys.served_model("mac"), b"x" * 1500, ex=60)
            pipeline.zadd(store.Keys.models, {"mac": time.time() + 60})
            pipeline.execute()

    return meter.of(write, 200)


def _share_by_worker(connection: Redis, meter: Meter) -> float:
    """Measure how a claim's cost grows with the workers, if the queue is not deep."""
    found = {}
    for count in NUM_WORKERS:
        connection.flushall()
        submit_jobs(connection, 200)
        speeds = {f"w{number}": f"{1 + number % 7}:{time.time() + 600:.3f}" for number in range(count)}
        connection.hset(store.Keys.speeds(MODEL), mapping=speeds)  # type: ignore[arg-type]
        leases = _leases(connection, "w1")
        found[count] = meter.of(lambda leases=leases: _claim(leases, connection, 1), 20)  # type: ignore[misc]
    few, many = NUM_WORKERS
    return max(0.0, found[many] - found[few]) / (many - few)


def _tokens(connection: Redis, meter: Meter, num_rows: int) -> float:
    """Measure a write of one new token of each of so many sequences."""
    connection.flushall()
    deltas = [
        wire.TokenDelta(id=uuid4().hex, sequence=0, first=number, token_ids=[number], token_bytes=[b"word"])
        for number in range(num_rows)
    ]
    script = connection.register_script(APPEND_DELTAS)
    keys = [store.TOKENS, store.Keys.missing_tokens]
    args: list[Any] = [MAX_STREAM_LENGTH, "", "", 1, wire.encode(wire.TokenDeltas(deltas))]
    return meter.of(lambda: script(keys, args), 500)


def _rtt_s(connection: Redis) -> float:
    times = []
    for _ in range(200):
        started_at = time.perf_counter()
        connection.ping()
        times.append(time.perf_counter() - started_at)
    return sorted(times)[100]


def _fixed_and_each(costs: dict[int, float]) -> tuple[float, float]:
    """Divide the costs of messages of few and of many jobs into a fixed cost and one per job."""
    few, many = BATCHES
    each = max(0.0, (costs[many] - costs[few]) / (many - few))
    return max(0.0, costs[few] - few * each), each
