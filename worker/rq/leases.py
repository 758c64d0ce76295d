"""Hold jobs: claim, extend, reclaim and release their leases, and record their outcomes.

A lease lives in RQ's own keys (drawn in store/lua/lease.lua). It ends when the execution's hash expires in Redis, so
the clocks of the Macs need not agree. A worker that lost its lease cannot write results: see `check_leases` and
commit.py.

The answer of a claim can be lost with the connection, after Redis has leased the jobs. So a claim has an id, and calls
repeat it until one of them is answered. That answer holds the jobs that were leased under the id.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Protocol
from uuid import uuid4

from redis import Redis
from redis.client import Pipeline
from redis.commands.core import Script
from rq.queue import Queue
from rq.utils import as_text

from scorepool.store import JobField, RqKeys
from scorepool.store.scripts import load
from scorepool.worker.rq.wrong_types import WrongTypeLog, is_wrong_type

GRACE_S = 86_400  # beyond a lease's end, before RQ's own cleaners may take the job
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


class LeaseHolder(Protocol):
    """A job that is held: an InFlightJob."""

    @property
    def lease_key(self) -> str: ...  # "<job id>:<execution id>"
    @property
    def queue(self) -> Queue: ...


class _ClaimScript:
    """A script that leases jobs. A call repeats the claim id of the previous one if that got no answer."""

    def __init__(self, connection: Redis, name: str) -> None:
        self._script: Script = connection.register_script(load(name))
        self._id = ""

    def __call__(self, keys: list[str], before: list[Any], after: list[Any]) -> Any:
        """Call the script with its claim id, and whether that is repeated, between the arguments."""
        is_repeated = bool(self._id)
        self._id = self._id or uuid4().hex[:24]
        answer = self._script(keys=keys, args=[*before, self._id, int(is_repeated), *after])
        self._id = ""
        return answer


class Leases:
    """The leases of one worker. `claim` and `reclaim` are for its main thread; the rest is thread-safe."""

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
        self.lease_ms = int(lease_s * 1000)
        self.wrong_types = wrong_types or WrongTypeLog(getLogger(__name__))
        self._claim = _ClaimScript(connection, "claim.lua")
        self._reclaim = _ClaimScript(connection, "reclaim.lua")
        self._extend = connection.register_script(load("extend.lua"))
        self._release = connection.register_script(load("release.lua"))

    def claim(
        self,
        queues: Sequence[Queue],
        max_jobs: int,
        num_in_flight: int,
        max_in_flight: int,
        list_length: int,
        round_robin: bool,
    ) -> list[ClaimedJob] | None:
        """Lease at most `max_jobs` jobs, in one round trip; return None while workers are suspended.

        `max_in_flight` is below the worker's capacity while a job in flight may have killed a worker (see
        store/lua/reclaim.lua); the script also applies the limit of each job that it claims. `list_length` is how many
        jobs each queue holds in RQ's list afterwards, if so many wait (see store/lua/backlog.lua).
        """
        answer = self._claim(
            _queue_keys(queues),
            [max_jobs, num_in_flight, max_in_flight, int(round_robin), self.worker_key],
            [list_length, *self._lease_args()],
        )
        if answer is None:
            return None
        rows, wrong_types = answer
        self.wrong_types.report(wrong_types)
        return _claimed_jobs(queues, rows)

    def reclaim(self, queues: Sequence[Queue], crash_limit: int) -> tuple[int, list[ClaimedJob]]:
        """Put the jobs of dead workers back on their queues. Return how many, and the jobs that the caller must end."""
        num_back, rows, wrong_types = self._reclaim(_queue_keys(queues), [crash_limit], self._lease_args())
        self.wrong_types.report(wrong_types)
        return int(num_back), _claimed_jobs(queues, rows)

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

    def expire(self, lease_keys: Iterable[str]) -> None:
        """End leases now: the next reclaim finds them."""
        keys = [RqKeys.execution(lease_key) for lease_key in lease_keys]
        if keys:
            self.connection.delete(*keys)

    def check_leases(self, jobs: Sequence[LeaseHolder]) -> list[tuple[bool, bool]]:
        """Return for each job whether this worker holds it and it still exists, and whether other jobs depend on it.

        A lease whose registry has a wrong type is held until it expires.
        """
        with self.connection.pipeline(transaction=False) as pipeline:
            for job in jobs:
                job_id = job.lease_key.partition(":")[0]
                pipeline.zscore(job.queue.started_job_registry.key, job.lease_key)
                pipeline.exists(RqKeys.execution(job.lease_key))
                pipeline.hexists(RqKeys.job(job_id), JobField.DATA)
                pipeline.scard(RqKeys.dependents(job_id))
            replies = iter(pipeline.execute(raise_on_error=False))
        answers = []
        for score, has_execution, has_data, num_dependents in zip(replies, replies, replies, replies, strict=True):
            for reply in (score, has_execution, has_data, num_dependents):
                if isinstance(reply, Exception) and not is_wrong_type(reply):
                    raise reply
            is_held = has_execution == 1 if is_wrong_type(score) else score is not None
            answers.append((is_held and has_data == 1, not is_wrong_type(num_dependents) and num_dependents > 0))
        return answers

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
