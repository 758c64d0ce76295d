"""The usual end: a job succeeded, and no other job waits for it. All that ended together are written by one script."""

from collections.abc import Iterator, Sequence

from redis import Redis
from rq.results import Result as RqResult
from rq.utils import now, utcformat
from rq.worker import WorkerStatus

from scorepool.worker.rq.in_flight import InFlightJob
from scorepool.worker.rq.job import age_s
from scorepool.worker.rq.leases import FINISH, Leases

MAX_BYTES = 64 * 1024 * 1024  # of outcomes in one message; Redis hangs up on one of a gibibyte


class SuccessWriter:
    def __init__(self, connection: Redis, leases: Leases, default_result_ttl_s: int) -> None:
        self._leases = leases
        self._default_result_ttl_s = default_result_ttl_s
        self._finish = connection.register_script(FINISH)

    def write(
        self, flights: Sequence[InFlightJob], still_flying: InFlightJob | None, rest: WorkerStatus
    ) -> tuple[list[InFlightJob], list[InFlightJob]]:
        """Returns the flights recorded, and those whose end is not of this kind. What is in neither was lost."""
        recorded: list[InFlightJob] = []
        left = [flight for flight in flights if not self._takes(flight)]
        for batch in _batches([flight for flight in flights if self._takes(flight)]):
            current_job = "" if still_flying is None else still_flying.job.id
            args: list[str | bytes | int | float] = [
                *(self._leases.worker_key, utcformat(now()), rest.value, current_job)
            ]
            for flight in batch:
                args += self._arguments(flight)
            answers = self._finish(keys=[flight.queue.started_job_registry.key for flight in batch], args=args)
            for flight, answer in zip(batch, answers, strict=True):
                if answer == b"recorded":
                    recorded.append(flight)
                elif answer == b"awaited":
                    left.append(flight)
        return recorded, left

    def _takes(self, flight: InFlightJob) -> bool:
        is_last = flight.error is None and flight.retry_delay_s is None
        return is_last and not flight.job._dependency_ids and self._ttl_s(flight) > 0

    def _arguments(self, flight: InFlightJob) -> Iterator[str | bytes | int | float]:
        job = flight.job
        assert job.ended_at is not None
        result = RqResult(
            job.id,
            RqResult.Type.SUCCESSFUL,
            connection=job.connection,
            return_value=None if job.has_outcome else flight.value,
            worker_name=self._leases.worker_name,
            execution_id=flight.execution.id,
            execution_started_at=flight.execution.created_at,
            execution_ended_at=job.ended_at,
        )
        result.serializer = job.serializer  # not among the arguments: RQ looks at one for longer than we do at a job
        fields = {"ended_at": utcformat(job.ended_at), **job.notes}
        yield from (flight.member, job.outcome or b"", self._ttl_s(flight), age_s(job.started_at, job.ended_at))
        for mapping in (fields, result.serialize()):
            yield 2 * len(mapping)
            for name, value in mapping.items():
                yield from (name, value)

    def _ttl_s(self, flight: InFlightJob) -> int:
        return flight.job.get_result_ttl(self._default_result_ttl_s)


def _batches(flights: Sequence[InFlightJob]) -> Iterator[list[InFlightJob]]:
    """At most MAX_BYTES of outcomes each, but for a single one that has more."""
    batch: list[InFlightJob] = []
    num_bytes = 0
    for flight in flights:
        size = len(flight.job.outcome or b"")
        if batch and num_bytes + size > MAX_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(flight)
        num_bytes += size
    if batch:
        yield batch
