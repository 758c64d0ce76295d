"""Write the usual end: a job succeeded, and no other job depends on it. One script writes a whole batch of them."""

from collections.abc import Iterator, Sequence
from typing import Any

from redis import Redis
from rq.results import Result as RqResult
from rq.utils import utcformat
from rq.worker import WorkerStatus

from scorepool.store import JobField
from scorepool.store.scripts import load
from scorepool.worker.rq.in_flight import InFlightJob
from scorepool.worker.rq.job import elapsed_s
from scorepool.worker.rq.leases import Leases

MAX_BYTES = 64 * 1024 * 1024  # of outcomes in one message; Redis hangs up on one of a gibibyte


class SuccessWriter:
    """Write successes. Used by the worker's main thread only."""

    def __init__(self, connection: Redis, leases: Leases, default_result_ttl_s: int) -> None:
        self._leases = leases
        self._default_result_ttl_s = default_result_ttl_s
        self.script = connection.register_script(load("finish.lua"))

    def write(
        self, jobs: Sequence[InFlightJob], current: InFlightJob | None, idle_state: WorkerStatus
    ) -> tuple[list[InFlightJob], list[InFlightJob]]:
        """Write successes. Return the jobs recorded, and those that the caller must end.

        A job in neither list has lost its lease.
        """
        recorded: list[InFlightJob] = []
        left = [inflight for inflight in jobs if not self.is_plain_success(inflight)]
        for batch in _batches([inflight for inflight in jobs if self.is_plain_success(inflight)]):
            keys, args = self.message(batch, current, idle_state)
            ours, awaited = self.read(batch, self.script(keys=keys, args=args))
            recorded += ours
            left += awaited
        return recorded, left

    def next_batch(self, jobs: Sequence[InFlightJob]) -> list[InFlightJob]:
        """Return the first jobs, as many as fit one message."""
        return next(_batches(jobs), [])

    def message(
        self, batch: Sequence[InFlightJob], current: InFlightJob | None, idle_state: WorkerStatus
    ) -> tuple[list[str], list[str | bytes | int | float]]:
        """Return the keys and arguments with which `script` writes these successes."""
        current_job = "" if current is None else current.job.id
        args: list[str | bytes | int | float] = [self._leases.worker_key, idle_state.value, current_job]
        for inflight in batch:
            args += self._arguments(inflight)
        return [inflight.queue.started_job_registry.key for inflight in batch], args

    def read(self, batch: Sequence[InFlightJob], reply: Any) -> tuple[list[InFlightJob], list[InFlightJob]]:
        """Read the reply of `script`. Return the jobs recorded, and those that the caller must end."""
        answers, wrong_types = reply
        self._leases.wrong_types.report(wrong_types)
        by_answer: dict[bytes, list[InFlightJob]] = {b"recorded": [], b"awaited": [], b"lost": []}
        for inflight, answer in zip(batch, answers, strict=True):
            by_answer[answer].append(inflight)
        return by_answer[b"recorded"], by_answer[b"awaited"]

    def is_plain_success(self, inflight: InFlightJob) -> bool:
        """True if the script can write this end."""
        is_last = inflight.error is None and inflight.retry_delay_s is None
        return is_last and not inflight.job._dependency_ids and self._ttl_s(inflight) > 0

    def _arguments(self, inflight: InFlightJob) -> Iterator[str | bytes | int | float]:
        job = inflight.job
        assert job.ended_at is not None
        result = RqResult(
            job.id,
            RqResult.Type.SUCCESSFUL,
            connection=job.connection,
            return_value=None if job.has_outcome else inflight.value,
            worker_name=self._leases.worker_name,
            execution_id=inflight.execution.id,
            execution_started_at=inflight.execution.created_at,
            execution_ended_at=job.ended_at,
        )
        result.serializer = job.serializer  # set here: RQ's check of an argument takes longer than the rest
        fields = {JobField.ENDED_AT: utcformat(job.ended_at), **job.extra_fields}
        yield from (
            inflight.lease_key,
            job.outcome or b"",
            self._ttl_s(inflight),
            elapsed_s(job.started_at, job.ended_at),
        )
        for mapping in (fields, result.serialize()):
            yield 2 * len(mapping)
            for name, value in mapping.items():
                yield from (name, value)

    def _ttl_s(self, inflight: InFlightJob) -> int:
        return inflight.job.get_result_ttl(self._default_result_ttl_s)


def _batches(jobs: Sequence[InFlightJob]) -> Iterator[list[InFlightJob]]:
    """Split jobs into batches of at most MAX_BYTES of outcomes; a larger outcome has a batch of its own."""
    batch: list[InFlightJob] = []
    num_bytes = 0
    for inflight in jobs:
        size = len(inflight.job.outcome or b"")
        if batch and num_bytes + size > MAX_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(inflight)
        num_bytes += size
    if batch:
        yield batch
