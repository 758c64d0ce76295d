"""How flights end in Redis: all that are over, with RQ's own bookkeeping and their outcomes.

Those that succeeded, nearly all, are written by one script (success.py); the others by RQ's own methods, in one
transaction.

Recording is fenced. Every job's hash is watched before its lease is looked up, and whoever takes a job away touches its
hash, so the transaction goes through only if all its leases are still ours. It may therefore be repeated at will, also
when Redis went away in the middle: what had been recorded is then no longer held.
"""

import traceback
from collections.abc import Callable, Sequence
from logging import Logger
from typing import Any

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import WatchError
from rq.job import JobStatus, Retry
from rq.repeat import Repeat
from rq.results import Result as RqResult
from rq.timeouts import BaseDeathPenalty
from rq.utils import now
from rq.worker import WorkerStatus

from scorepool import wire
from scorepool.worker.rq.errors import JobError, Stopped, explain
from scorepool.worker.rq.in_flight import InFlightJob
from scorepool.worker.rq.job import age_s
from scorepool.worker.rq.leases import Leases
from scorepool.worker.rq.scheduler import put_off
from scorepool.worker.rq.success_writer import SuccessWriter


class ResultCommitter:
    def __init__(
        self,
        connection: Redis,
        leases: Leases,
        default_result_ttl_s: int,
        death_penalty: type[BaseDeathPenalty],
        report: Callable[..., None],
        log: Logger,
    ) -> None:
        self.connection = connection
        self.leases = leases
        self.default_result_ttl_s = default_result_ttl_s
        self.death_penalty = death_penalty
        self.report = report  # RQ's handle_exception(job, type, error, traceback)
        self.log = log
        self.successes = SuccessWriter(connection, leases, default_result_ttl_s)

    def end(
        self, flights: Sequence[InFlightJob], still_flying: InFlightJob | None, rest: WorkerStatus = WorkerStatus.IDLE
    ) -> list[InFlightJob]:
        """Record the end of every flight that is still ours; return those.

        `still_flying` is what RQ shows as the worker's current job afterwards; without one, its state is `rest`.
        """
        for flight in flights:
            if not flight.is_decided:
                self._decide(flight)
                flight.is_decided = True
        recorded, left = self.successes.write(flights, still_flying, rest)
        while left:
            try:
                ours, left = self._commit(left, still_flying, rest)
                recorded += ours
            except WatchError:  # a beat or a cancel touched one of the jobs, or another job now depends on one
                continue
        return recorded

    def _commit(
        self, flights: Sequence[InFlightJob], still_flying: InFlightJob | None, rest: WorkerStatus
    ) -> tuple[list[InFlightJob], list[InFlightJob]]:
        """One transaction. Returns the flights recorded, and those still to be: RQ releases the dependents of one job
        at a time."""
        with self.connection.pipeline() as pipeline:
            keys = [key for flight in flights for key in (flight.job.key, flight.job.dependents_key)]
            pipeline.watch(*keys)
            standing = list(zip(flights, self.leases.standing(flights), strict=True))
            ours = [flight for flight, (is_held, _) in standing if is_held]
            parents = [
                flight
                for flight, (is_held, has_dependents) in standing
                if is_held and has_dependents and flight.retry_delay_s is None
            ]
            if parents:
                ours = [flight for flight in ours if flight not in parents[1:]]
                self._release_dependents(parents[0], pipeline)
            if not pipeline.explicit_transaction:
                pipeline.multi()
            for flight in ours:
                self._write(flight, pipeline)
            self._count(ours, still_flying, rest, pipeline)
            pipeline.execute()
        return ours, parents[1:]

    def _release_dependents(self, parent: InFlightJob, pipeline: Pipeline) -> None:
        """Into their queues, in the transaction that ends what they wait for. RQ itself calls MULTI."""
        parent.job._status = _status(parent)
        parent.queue.enqueue_dependents(parent.job, pipeline=pipeline, refresh_job_status=False)

    # What the end is: decided once, before the first attempt to write it.

    def _decide(self, flight: InFlightJob) -> None:
        job = flight.job
        job.ended_at = now()
        if flight.error is None and not isinstance(flight.value, Retry):
            job._status = JobStatus.FINISHED  # as callbacks are shown it
            self._call_back(flight, job.execute_success_callback, flight.value)
        if job.has_outcome:
            self._decide_outcome(flight)
        elif isinstance(flight.value, Retry):
            self._decide_asked_retry(flight, flight.value)
        elif flight.error is not None and not isinstance(flight.error, Stopped | JobError) and job.should_retry:
            flight.retry_delay_s = job.get_retry_interval()
            job.retries_left = (job.retries_left or 1) - 1
        elif flight.error is None and job.repeats_left:
            job.repeats_left -= 1
            flight.retry_delay_s = Repeat.get_interval(job.repeats_left, job.repeat_intervals or [0])
        if isinstance(flight.error, Stopped):
            self._call_back(flight, job.execute_stopped_callback)
        elif flight.error is not None:
            error = flight.error
            job._status = JobStatus.FAILED
            self._call_back(flight, job.execute_failure_callback, type(error), error, error.__traceback__)
            if not isinstance(flight.error, JobError):
                self.report(job, type(error), error, error.__traceback__)

    def _decide_outcome(self, flight: InFlightJob) -> None:
        """A job of the API ends now, with a Result or a Failure: none of its failures goes away by trying again."""
        job = flight.job
        if flight.error is None:
            try:
                if not isinstance(flight.value, wire.Result):
                    raise TypeError(f"the job's function returned {type(flight.value).__name__}, not wire.Result")
                job.outcome = wire.encode(flight.value)
                return
            except Exception as error:
                flight.error = error
        failure = explain(flight.error, job.timeout)
        job.outcome = wire.encode(failure)
        job.retries_left = 0
        if failure.code == "internal" and not isinstance(flight.error, JobError):
            # Where, but not what: an error's own words may quote the prompt.
            where = "".join(traceback.format_tb(flight.error.__traceback__))
            self.log.error("job %s: %s\n%s", job.id, type(flight.error).__name__, where)
        flight.error = flight.error if isinstance(flight.error, Stopped) else JobError(failure)

    def _decide_asked_retry(self, flight: InFlightJob, retry: Retry) -> None:
        """The function returned Retry(...)."""
        job = flight.job
        num_before = job.number_of_retries or 0
        if num_before >= retry.max:
            flight.error = RuntimeError(f"gave up after {num_before} retries")
        else:
            job.number_of_retries = num_before + 1
            flight.retry_delay_s = Retry.get_interval(num_before, retry.intervals)

    def _call_back(self, flight: InFlightJob, execute: Callable[..., None], *args: Any) -> None:
        """A success callback that fails fails its job, as in RQ; any other only says so in the log."""
        try:
            execute(self.death_penalty, *args)
        except Exception as error:
            self.log.exception("job %s: its callback failed", flight.job.id)
            flight.error = flight.error or error

    # Writing it: may run several times, so it changes nothing but the pipeline.

    def _write(self, flight: InFlightJob, pipeline: Pipeline) -> None:
        flight.execution.delete(job=flight.job, pipeline=pipeline)
        pipeline.hdel(flight.job.key, "crashes", "company")  # it came to an end, so it is none that kills workers
        if flight.job.notes:
            pipeline.hset(flight.job.key, mapping=flight.job.notes)  # type: ignore[arg-type]
        if flight.retry_delay_s is not None:
            self._write_again(flight, flight.retry_delay_s, pipeline)
        elif flight.error is not None:
            self._write_failure(flight, flight.error, pipeline)
        else:
            self._write_success(flight, pipeline)

    def _write_success(self, flight: InFlightJob, pipeline: Pipeline) -> None:
        job = flight.job
        ttl_s = job.get_result_ttl(self.default_result_ttl_s)
        if not job.has_outcome:
            job._result = flight.value
        if ttl_s != 0:
            job._handle_success(ttl_s, pipeline, **self._execution(flight))
        job.cleanup(ttl_s, pipeline=pipeline, remove_from_queue=False)

    def _write_failure(self, flight: InFlightJob, error: BaseException, pipeline: Pipeline) -> None:
        job = flight.job
        job.set_status(_status(flight), pipeline=pipeline)
        if isinstance(error, JobError | Stopped):
            text = str(error) or "Job stopped by user."
        else:
            text = "".join(traceback.format_exception(error))
        job._handle_failure(text, pipeline, **self._execution(flight))

    def _write_again(self, flight: InFlightJob, delay_s: int, pipeline: Pipeline) -> None:
        """The job is to run again: a retry of a failure, one that it asked for, or RQ's Repeat of a success."""
        job, queue = flight.job, flight.queue
        if isinstance(flight.value, Retry):
            RqResult.create_retried(job, job.failure_ttl, flight.value, pipeline=pipeline, **self._execution(flight))
        elif flight.error is None:
            job._result = flight.value
            job._handle_success(job.get_result_ttl(self.default_result_ttl_s), pipeline, **self._execution(flight))
        if delay_s:
            pipeline.sadd(queue.redis_queues_keys, queue.key)
            queue._persist_job(job, pipeline, status=JobStatus.SCHEDULED)
            put_off(pipeline, queue, job.id, delay_s)
        else:
            queue._enqueue_job(job, pipeline=pipeline, at_front=job.enqueue_at_front_on_retry)

    def _execution(self, flight: InFlightJob) -> dict[str, Any]:
        return {
            "worker_name": self.leases.worker_name,
            "execution_id": flight.execution.id,
            "execution_started_at": flight.execution.created_at,
            "execution_ended_at": flight.job.ended_at,
        }

    def _count(
        self, ours: Sequence[InFlightJob], still_flying: InFlightJob | None, rest: WorkerStatus, pipeline: Pipeline
    ) -> None:
        """The worker's own fields, which `rq info` and dashboards show."""
        key = self.leases.worker_key
        num_failed = sum(flight.error is not None for flight in ours)
        working_s = sum(age_s(flight.job.started_at, flight.job.ended_at or now()) for flight in ours)
        pipeline.hincrby(key, "successful_job_count", len(ours) - num_failed)
        pipeline.hincrby(key, "failed_job_count", num_failed)
        pipeline.hincrbyfloat(key, "total_working_time", working_s)
        if still_flying is None:
            pipeline.hset(key, "state", rest)
            pipeline.hdel(key, "current_job")
        else:
            pipeline.hset(key, "current_job", still_flying.job.id)


def _status(flight: InFlightJob) -> JobStatus:
    """Of a job that ends."""
    if flight.error is None:
        return JobStatus.FINISHED
    return JobStatus.STOPPED if isinstance(flight.error, Stopped) else JobStatus.FAILED
