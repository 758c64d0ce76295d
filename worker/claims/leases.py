"""Hold jobs: claim, extend, reclaim and release their leases, and record their outcomes.

A lease lives in RQ's own keys (drawn in store/lua/lease.lua). It ends when the execution's hash expires in Redis, so
the clocks of the Macs need not agree. A worker that lost its lease cannot write results: see `check_leases` and
commit.py.

The reply of a claim can be lost with the connection, after Redis has leased the jobs, and the network can deliver a
claim so late that nobody waits for its reply. So claims are numbered: Redis runs none after a later one. A claim after
a lost reply names the leases that the worker knows, and its reply holds the others.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Protocol
from uuid import uuid4

from redis import Redis
from redis.client import Pipeline
from rq.queue import Queue
from rq.utils import as_text

from scorepool.store import LIST_LENGTH, Keys
from scorepool.store.scripts import load
from scorepool.worker.claims.lease_length import LeaseLength
from scorepool.worker.redis_link.wrong_types import WrongTypeLog, execute_reads

GRACE_S = 86_400  # beyond a lease's end, before RQ's own cleaners may take the job
MAX_STARTABLE = 10_000  # that a claim says; more is the same to the scripts
MAX_BYTES = 64 * 1024 * 1024
RECORD_OUTCOME = load("record_outcome.lua")


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """One leased job as Redis holds it."""

    queue: Queue
    job_id: str
    execution_id: str
    fields: dict[bytes, bytes]  # the job's hash
    request: bytes | None  # wire.encode(wire.Request)
    leased_at: float  # unix, s, by Redis's clock

    @property
    def lease_key(self) -> str:
        return f"{self.job_id}:{self.execution_id}"


class LeaseHolder(Protocol):
    """A job that is held: an InFlightJob."""

    @property
    def lease_key(self) -> str: ...  # "<job id>:<execution id>"
    @property
    def queue(self) -> Queue: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a worker asks for."""

    max_jobs: int
    num_in_flight: int  # of these queues
    num_elsewhere: int = 0  # in flight of the worker's other queues
    max_in_flight: int  # below the worker's capacity while a job in flight may have killed a worker (reclaim.lua)
    list_length: int = LIST_LENGTH
    max_bytes: int = MAX_BYTES  # of requests in the reply; the last one may exceed it
    round_robin: bool = False
    speed: float | None = None  # work per second, by the worker's own measure (store/lua/speeds.lua)
    writes_speed: bool = False
    exceeds_share: bool = False  # claim also what should be left to other workers
    waits: bool = False  # get a message when there are jobs (store/lua/wake.lua)
    num_startable: int = MAX_STARTABLE  # jobs that would begin at once; others are sent elsewhere first
    max_taken_over: int = 0  # jobs that other workers have claimed and not begun
    excluded: Sequence[str] = ()  # owners whose jobs are not claimed
    begun: Sequence[str] = ()  # keys of leases whose jobs have begun since the last claim
    known: Sequence[str] | None = None  # keys of all leases that the worker knows, after a lost reply or message

    def arguments(self) -> list[str | int | float]:
        """Return the arguments of store/lua/claim.lua from `max_jobs` on."""
        speed = "-" if not self.writes_speed else "" if self.speed is None else f"{self.speed:.6g}"
        args: list[str | int | float] = [self.max_jobs, self.num_in_flight, self.max_in_flight, int(self.round_robin)]
        args += [self.list_length, self.max_bytes, speed]
        args += [int(self.exceeds_share), self.num_startable if self.waits else -1, self.max_taken_over]
        args += [self.num_elsewhere, len(self.excluded), *self.excluded, len(self.begun), *self.begun]
        args += [-1] if self.known is None else [len(self.known), *self.known]
        return args


@dataclass(frozen=True, slots=True)
class Claimed:
    """The reply to a claim."""

    jobs: list[ClaimedJob]
    num_waiting: int = 0  # jobs that wait in the queues
    is_suspended: bool = False  # by `rq suspend` or `POST /pause`


class Leases:
    """The leases of one worker. `claim` and `reclaim` are for its link (link.py); the rest is thread-safe."""

    def __init__(
        self,
        connection: Redis,
        worker_name: str,
        worker_key: str,
        lease_s: float,
        wrong_types: WrongTypeLog | None = None,
    ) -> None:
        self.connection = connection
        self.worker_name = worker_name
        self.worker_key = worker_key
        self.length = LeaseLength(lease_s)
        self.wrong_types = wrong_types or WrongTypeLog(getLogger(__name__))
        self._session = uuid4().hex[:12]
        self._claim_numbers = itertools.count(1)  # of both links
        self.claim_script = connection.register_script(load("claim.lua"))
        self._reclaim = connection.register_script(load("reclaim.lua"))
        self._extend = connection.register_script(load("extend.lua"))
        self._release = connection.register_script(load("release.lua"))
        self._check_leases = connection.register_script(load("check_leases.lua"))

    @property
    def lease_ms(self) -> int:
        """The length of the leases that are claimed or extended now."""
        return int(self.length.seconds * 1000)

    def claim(self, queues: Sequence[Queue], claim: Claim) -> Claimed:
        """Lease jobs, in one round trip."""
        return self.read_claim(queues, self.claim_script(*self.claim_arguments(queues, claim)))

    def claim_arguments(self, queues: Sequence[Queue], claim: Claim) -> tuple[list[str], list[str | int | float]]:
        """Return the keys and arguments of a new claim, for `claim_script`."""
        args: list[str | int | float] = [self.worker_name, self.worker_key, self.lease_ms, GRACE_S]
        return _queue_keys(queues), [*args, self._session, next(self._claim_numbers), *claim.arguments()]

    def read_claim(self, queues: Sequence[Queue], reply: Any) -> Claimed:
        """Read the reply of `claim_script`."""
        if reply is None:
            return Claimed([], is_suspended=True)
        rows, wrong_types, num_waiting = reply
        self.wrong_types.report(wrong_types)
        return Claimed(_claimed_jobs(queues, rows), num_waiting)

    def reclaim(
        self, queues: Sequence[Queue], crash_limit: int, held_by_dead: Sequence[str] = ()
    ) -> tuple[int, list[ClaimedJob]]:
        """Put the jobs of silent workers, and of one dead worker, back on their queues.

        `held_by_dead` are the keys of the leases of the dead one. Return how many jobs were put back, and the jobs that
        the caller must end.
        """
        call_id = f"{self._session}{uuid4().hex[:12]}"
        args = [crash_limit, call_id, *self._lease_args(), int(self.length.setting_s * 1000), *held_by_dead]
        num_back, rows, wrong_types = self._reclaim(keys=_queue_keys(queues), args=args)
        self.wrong_types.report(wrong_types)
        return int(num_back), _claimed_jobs(queues, rows)

    def leave(self, queues: Sequence[Queue], known: Sequence[str]) -> None:
        """Wait for no more messages about jobs, and leave no share to this worker.

        `known` are the keys of the leases that the worker knows. Others are in replies and messages that are under way:
        their jobs are put back.
        """
        with self.connection.pipeline(transaction=False) as pipeline:
            for queue in queues:
                pipeline.zrem(Keys.waiting_workers(queue.name), self.worker_name)
                pipeline.hdel(Keys.speeds(queue.name), self.worker_name)
            execute_reads(pipeline)
        unknown = self.claim(queues, Claim(max_jobs=0, num_in_flight=0, max_in_flight=1, known=known))
        self.release(unknown.jobs)

    def extend(self, jobs: Sequence[LeaseHolder]) -> tuple[set[str], set[str]]:
        """Extend leases. Return the keys of those that were taken away, and of those whose job's owner canceled it."""
        if not jobs:
            return set(), set()
        lost, canceled, wrong_types = self._extend(
            keys=[job.queue.started_job_registry.key for job in jobs],
            args=[*self._lease_args(), *(job.lease_key for job in jobs)],
        )
        self.wrong_types.report(wrong_types)
        return {as_text(lease_key) for lease_key in lost}, {as_text(lease_key) for lease_key in canceled}

    def release(self, jobs: Sequence[LeaseHolder]) -> int:
        """Put jobs back at the front of their queues, in their old order and with all their retries.

        Return how many.
        """
        last_first = list(reversed(jobs))
        if not last_first:
            return 0
        keys = [key for job in last_first for key in _queue_keys([job.queue])]
        return int(self._release(keys=keys, args=[job.lease_key for job in last_first]))

    def check_leases(self, jobs: Sequence[LeaseHolder]) -> list[tuple[bool, bool]]:
        """Return for each job whether this worker holds it and it still exists, and whether other jobs depend on it.

        A lease whose registry has a wrong type is held until it expires.
        """
        keys = [job.queue.started_job_registry.key for job in jobs]
        answers = self._check_leases(keys=keys, args=[job.lease_key for job in jobs])
        return [(is_ours == 1, num_dependents > 0) for is_ours, num_dependents in answers]

    def _lease_args(self) -> list[str | int]:
        return [self.worker_name, self.lease_ms, GRACE_S]


def record_outcome(
    pipeline: Pipeline, job_id: str, outcome: bytes, ttl_s: int, keep_request: bool, canceled_queue: str = ""
) -> None:
    """Add a job's outcome to the MULTI that ends it. `ttl_s` <= 0 keeps it for ever.

    `canceled_queue` is the queue of a job that its owner canceled. EVAL, not EVALSHA: in a MULTI a script that
    Redis has forgotten (it was restarted) would fail alone, and the rest would go through.
    """
    pipeline.eval(RECORD_OUTCOME, 0, job_id, outcome, max(0, ttl_s), int(keep_request), canceled_queue)


def _queue_keys(queues: Iterable[Queue]) -> list[str]:
    return [key for queue in queues for key in (queue.key, queue.started_job_registry.key)]


def _claimed_jobs(queues: Sequence[Queue], rows: list[list[object]]) -> list[ClaimedJob]:
    found = []
    for index, job_id, execution_id, flat, request, leased_at in rows:
        assert isinstance(index, int)
        assert isinstance(flat, list)
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        ids = (as_text(job_id), as_text(execution_id))  # type: ignore[arg-type]
        found.append(ClaimedJob(queues[index - 1], *ids, fields, request, float(leased_at)))  # type: ignore[arg-type]
    return found
