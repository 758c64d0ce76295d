"""How a worker holds jobs: claim, extend, reclaim, release; and the scripts that end them, record_outcome and finish.

A lease lives in RQ's own keys (drawn in lua/lease.lua). Its end is the expiry of the execution's hash in Redis, so the
clocks of the Macs need not agree. Who holds it no more is fenced off: see `standing` and worker/rq/commit.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

from redis import Redis
from redis.client import Pipeline
from rq.queue import Queue
from rq.utils import as_text, now, utcformat

from scorepool.store import OUTBOX
from scorepool.store.scripts import load

GRACE_S = 86_400  # beyond a lease's end, before RQ's own cleaners may take the job


CLAIM = load("lease.lua", "backlog.lua", "claim.lua")
EXTEND = load("extend.lua")
RECLAIM = load("lease.lua", "reclaim.lua")
RELEASE = load("release.lua")
_SETTLE = OUTBOX + load("record_outcome.lua")
RECORD_OUTCOME = _SETTLE + "record_outcome(ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1', ARGV[5])"
FINISH = _SETTLE + load("finish.lua")
EMPTY = _SETTLE + load("empty.lua")


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """One leased job as Redis holds it."""

    queue: Queue
    job_id: str
    execution_id: str
    fields: dict[bytes, bytes]  # the job's hash
    request: bytes | None  # wire.encode(wire.Request)
    leased_at: float  # unix, s, by Redis's clock


class LeaseHolder(Protocol):
    """What holds a lease: a Flight."""

    @property
    def lease_key(self) -> str: ...  # "<job id>:<execution id>"
    @property
    def queue(self) -> Queue: ...


class Leases:
    """The leases of one worker. Thread-safe: it holds nothing that changes."""

    def __init__(self, connection: Redis, worker_name: str, worker_key: str, lease_s: float) -> None:
        self.connection = connection
        self.worker_name = worker_name
        self.worker_key = worker_key
        self.lease_ms = int(lease_s * 1000)
        self._claim = connection.register_script(CLAIM)
        self._extend = connection.register_script(EXTEND)
        self._reclaim = connection.register_script(RECLAIM)
        self._release = connection.register_script(RELEASE)

    def claim(
        self, queues: Sequence[Queue], room: int, in_flight: int, limit: int, batch: int, round_robin: bool
    ) -> list[ClaimedJob] | None:
        """Lease at most `room` jobs, in one round trip; None while workers are suspended.

        `limit` is how many may be in flight in all: fewer than there is room for, where a job in flight may have killed
        a worker (see lua/reclaim.lua). The next job is held to its own limit by the script. `batch` is how many jobs
        each queue is to hold in RQ's list afterwards, if so many wait (see lua/backlog.lua).
        """
        rows = self._claim(
            keys=_keys(queues),
            args=[
                room,
                in_flight,
                limit,
                int(round_robin),
                self.worker_key,
                uuid4().hex[:24],
                batch,
                *self._lease_args(),
            ],
        )
        return None if rows is None else _rows(queues, rows)

    def extend(self, jobs: Sequence[LeaseHolder]) -> tuple[set[str], set[str]]:
        """Returns the lease_keys of leases that were taken away, and of jobs that their owner asked to cancel."""
        if not jobs:
            return set(), set()
        lost, canceled = self._extend(
            keys=[inflight.queue.started_job_registry.key for inflight in jobs],
            args=[*self._lease_args(), *(inflight.lease_key for inflight in jobs)],
        )
        return {as_text(lease_key) for lease_key in lost}, {as_text(lease_key) for lease_key in canceled}

    def reclaim(self, queues: Sequence[Queue], crash_limit: int) -> tuple[int, list[ClaimedJob]]:
        """Put the jobs of workers that are gone back in their queues. Returns how many, and jobs to be ended by us."""
        num_back, rows = self._reclaim(keys=_keys(queues), args=[crash_limit, uuid4().hex[:24], *self._lease_args()])
        return int(num_back), _rows(queues, rows)

    def release(self, jobs: Sequence[LeaseHolder]) -> int:
        """Put jobs back at the front of their queues, in their old order and unspent."""
        last_first = list(reversed(jobs))
        if not last_first:
            return 0
        keys = [key for inflight in last_first for key in _keys([inflight.queue])]
        return int(self._release(keys=keys, args=[inflight.lease_key for inflight in last_first]))

    def expire(self, lease_keys: Iterable[str]) -> None:
        """End leases now: the next reclaim finds them."""
        keys = [f"rq:execution:{lease_key}" for lease_key in lease_keys]
        if keys:
            self.connection.delete(*keys)

    def check_leases(self, jobs: Sequence[LeaseHolder]) -> list[tuple[bool, bool]]:
        """Of each: whether the lease is still ours and its job still there, and whether other jobs depend on it."""
        with self.connection.pipeline(transaction=False) as pipeline:
            for inflight in jobs:
                job_id = inflight.lease_key.partition(":")[0]
                pipeline.zscore(inflight.queue.started_job_registry.key, inflight.lease_key)
                pipeline.hexists(f"rq:job:{job_id}", "data")
                pipeline.exists(f"rq:job:{job_id}:dependents")
            answers = iter(pipeline.execute())
        return [
            (score is not None and bool(is_there), bool(has_dependents))
            for score, is_there, has_dependents in zip(answers, answers, answers, strict=True)
        ]

    def _lease_args(self) -> list[str | int | float]:
        return [self.worker_name, self.lease_ms, utcformat(now()), GRACE_S]


def record_outcome(pipeline: Pipeline, job_id: str, outcome: bytes, ttl_s: int, keep_request: bool) -> None:
    """Add a job's outcome to the MULTI that ends it. `ttl_s` <= 0 keeps it for ever.

    EVAL, not EVALSHA: in a MULTI a script that Redis has forgotten (it was restarted) would fail alone, and the rest go
    through.
    """
    pipeline.eval(RECORD_OUTCOME, 0, job_id, outcome, max(0, ttl_s), int(keep_request), utcformat(now()))


def _keys(queues: Iterable[Queue]) -> list[str]:
    return [key for queue in queues for key in (queue.key, queue.started_job_registry.key)]


def _rows(queues: Sequence[Queue], rows: list[list[object]]) -> list[ClaimedJob]:
    found = []
    for index, job_id, execution_id, flat, request, at in rows:
        assert isinstance(index, int)
        assert isinstance(flat, list)
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        names = (as_text(job_id), as_text(execution_id))  # type: ignore[arg-type]
        found.append(ClaimedJob(queues[index - 1], *names, fields, request, float(at)))  # type: ignore[arg-type]
    return found
