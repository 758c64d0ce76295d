"""Record the ends of jobs in Redis, with RQ's own bookkeeping and their outcomes.

Jobs that succeeded, nearly all, are written by one script (success_writer.py); the others by RQ's own methods, in one
transaction.

Each write is fenced. Every job's hash is watched before its lease is looked up, and every script that takes a job away
writes its hash, so the transaction goes through only if all its leases are still ours. It may be repeated at any time,
even after a lost connection: a job that was recorded is no longer held.

Deciding and writing are separate: `decide` runs once per job, on the main thread, and calls its callbacks; `write` may
run several times, on another.
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
from rq.worker import WorkerStatus

from scorepool import wire
from scorepool.store import JobField
from scorepool.worker.claims.leases import Leases
from scorepool.worker.redis_link.wrong_types import drop_wrong_types
from scorepool.worker.rq.errors import JobError, Postponed, Stopped, failure_of
from scorepool.worker.rq.in_flight import InFlightJob
from scorepool.worker.rq.job import elapsed_s
from scorepool.worker.rq.scheduler import enqueue
from scorepool.worker.rq.success_writer import SuccessWriter


class ResultCommitter:
    """Record the ends of one worker's jobs."""

    def __init__(
        self,
        connection: Redis,
        leases: Leases,
        default_result_ttl_s: int,
        death_penalty: type[BaseDeathPenalty],
        handle_exception: Callable[..., None],
        log: Logger,
    ) -> None:
        self.connection = connection
        self.leases = leases
        self.default_result_ttl_s = default_result_ttl_s
        self.death_penalty = death_penalty
        self.handle_exception = handle_exception  # RQ's handle_exception(job, type, error, traceback)
        self.log = log
        self.successes = SuccessWriter(connection, leases, default_result_ttl_s)

    def commit(
        self, jobs: Sequence[InFlightJob], current: InFlightJob | None, idle_state: WorkerStatus = WorkerStatus.IDLE
    ) -> list[InFlightJob]:
        """Record the end of every job whose lease is still ours; return these jobs.

        `current` is what RQ shows as the worker's current job afterwards; without one, its state is `idle_state`.
        """
        for inflight in jobs:
            self.decide(inflight)
        recorded, left = self.successes.write(jobs, current, idle_state)
        return recorded + self.write(left, current, idle_state)

    def write(
        self, jobs: Sequence[InFlightJob], current: InFlightJob | None, idle_state: WorkerStatus
    ) -> list[InFlightJob]:
        """Write decided ends by RQ's own methods; return the jobs whose lease was still ours."""
        recorded: list[InFlightJob] = []
        left = list(jobs)
        while left:
            try:
                ours, left = self._commit(left, current, idle_state)
                recorded += ours
            except WatchError:  # a heartbeat or a cancel wrote one of the jobs, or another job now depends on one
                continue
        return recorded

    def _commit(
        self, jobs: Sequence[InFlightJob], current: InFlightJob | None, idle_state: WorkerStatus
    ) -> tuple[list[InFlightJob], list[InFlightJob]]:
        """Run one transaction.

        Return the jobs recorded, and those left: RQ releases the dependents of one job at a time.
        """
        with self.connection.pipeline() as pipeline:
            keys = [key for inflight in jobs for key in (inflight.job.key, inflight.job.dependents_key)]
            pipeline.watch(*keys)
            leases = list(zip(jobs, self.leases.check_leases(jobs), strict=True))
            ours = [inflight for inflight, (is_held, _) in leases if is_held]
            parents = [
                inflight
                for inflight, (is_held, has_dependents) in leases
                if is_held and has_dependents and inflight.retry_delay_s is None
            ]
            if parents:
                ours = [inflight for inflight in ours if inflight not in parents[1:]]
                self._release_dependents(parents[0], pipeline)
            if not pipeline.explicit_transaction:
                pipeline.multi()
            for inflight in ours:
                self._write(inflight, pipeline)
            self._write_worker_stats(ours, current, idle_state, pipeline)
            self.leases.wrong_types.report(drop_wrong_types(self.connection, pipeline))
            pipeline.execute()
        return ours, parents[1:]

    def _release_dependents(self, parent: InFlightJob, pipeline: Pipeline) -> None:
        """Put the dependents of a job on their queues, in the transaction that ends the job. RQ itself calls MULTI."""
        parent.job._status = _status(parent)
        parent.queue.enqueue_dependents(parent.job, pipeline=pipeline, refresh_job_status=False)

    # Decide: once, before the first attempt to write.

    def decide(self, inflight: InFlightJob) -> None:
        """Decide what the job's end is: call its callbacks, count its retries. Later calls do nothing."""
        if inflight.is_decided:
            return
        inflight.is_decided = True
        job = inflight.job
        job.ended_at = job.redis_now()
        if isinstance(inflight.error, Postponed):
            job.extra_fields = inflight.error.fields
            inflight.retry_delay_s = inflight.error.delay_s
            return
        if inflight.error is None and not isinstance(inflight.value, Retry):
            job._status = JobStatus.FINISHED  # callbacks read it
            self._run_callback(inflight, job.execute_success_callback, inflight.value)
        if asks_again := inflight.error is None and isinstance(inflight.value, Retry):
            self._decide_requested_retry(inflight, inflight.value)
        if job.has_outcome:
            if inflight.retry_delay_s is None:
                self._decide_outcome(inflight)
        elif asks_again:
            pass  # decided above
        elif inflight.error is not None and not isinstance(inflight.error, Stopped | JobError) and job.should_retry:
            inflight.retry_delay_s = job.get_retry_interval()
            job.retries_left = (job.retries_left or 1) - 1
        elif inflight.error is None and job.repeats_left:
            job.repeats_left -= 1
            inflight.retry_delay_s = Repeat.get_interval(job.repeats_left, job.repeat_intervals or [0])
        if isinstance(inflight.error, Stopped):
            self._run_callback(inflight, job.execute_stopped_callback)
        elif inflight.error is not None:
            error = inflight.error
            job._status = JobStatus.FAILED
            self._run_callback(inflight, job.execute_failure_callback, type(error), error, error.__traceback__)
            if not isinstance(inflight.error, JobError):
                self.handle_exception(job, type(error), error, error.__traceback__)

    def _decide_outcome(self, inflight: InFlightJob) -> None:
        """Decide the Result or the Failure with which a job of the API ends.

        The job is not retried, because it would fail again.
        """
        job = inflight.job
        if inflight.error is None:
            try:
                if not isinstance(inflight.value, wire.Result):
                    raise TypeError(f"the job's function returned {type(inflight.value).__name__}, not wire.Result")
                job.outcome = wire.encode(inflight.value)
                return
            except Exception as error:
                inflight.error = error
        failure = failure_of(inflight.error, job.timeout)
        job.outcome = wire.encode(failure)
        job.retries_left = 0
        if failure.code == "internal" and not isinstance(inflight.error, JobError):
            # The traceback without the message, which may quote the prompt.
            where = "".join(traceback.format_tb(inflight.error.__traceback__))
            self.log.error("%s\n%s", type(inflight.error).__name__, where, extra={"job": job.id})
        inflight.error = inflight.error if isinstance(inflight.error, Stopped) else JobError(failure)

    def _decide_requested_retry(self, inflight: InFlightJob, retry: Retry) -> None:
        """Decide when a job whose function returned Retry(...) runs again."""
        job = inflight.job
        num_before = job.number_of_retries or 0
        if num_before >= retry.max:
            inflight.error = RuntimeError(f"gave up after {num_before} retries")
        else:
            job.number_of_retries = num_before + 1
            inflight.retry_delay_s = Retry.get_interval(num_before, retry.intervals)

    def _run_callback(self, inflight: InFlightJob, execute: Callable[..., None], *args: Any) -> None:
        """Run a callback. A success callback that fails fails its job, as in RQ; the failure of another is logged."""
        try:
            with inflight.job.as_current():
                execute(self.death_penalty, *args)
        except Exception as error:
            self.log.exception("its callback failed", extra={"job": inflight.job.id})
            inflight.error = inflight.error or error

    # Write: may run several times, so it changes nothing but the pipeline.

    def _write(self, inflight: InFlightJob, pipeline: Pipeline) -> None:
        inflight.execution.delete(job=inflight.job, pipeline=pipeline)
        pipeline.hdel(inflight.job.key, JobField.CRASHES, JobField.MAX_CONCURRENCY)  # no longer a suspect
        if inflight.job.extra_fields:
            pipeline.hset(inflight.job.key, mapping=inflight.job.extra_fields)  # type: ignore[arg-type]
        if inflight.retry_delay_s is not None:
            self._write_rerun(inflight, inflight.retry_delay_s, pipeline)
        elif inflight.error is not None:
            self._write_failure(inflight, inflight.error, pipeline)
        else:
            self._write_success(inflight, pipeline)

    def _write_success(self, inflight: InFlightJob, pipeline: Pipeline) -> None:
        job = inflight.job
        ttl_s = job.get_result_ttl(self.default_result_ttl_s)
        if not job.has_outcome:
            job._result = inflight.value
        if ttl_s != 0:
            job._handle_success(ttl_s, pipeline, **self._execution(inflight))
        job.cleanup(ttl_s, pipeline=pipeline, remove_from_queue=False)

    def _write_failure(self, inflight: InFlightJob, error: BaseException, pipeline: Pipeline) -> None:
        job = inflight.job
        job.set_status(_status(inflight), pipeline=pipeline)
        if isinstance(error, JobError | Stopped):
            text = str(error) or "Job stopped by user."
        else:
            text = "".join(traceback.format_exception(error))
        job._handle_failure(text, pipeline, **self._execution(inflight))

    def _write_rerun(self, inflight: InFlightJob, delay_s: int, pipeline: Pipeline) -> None:
        """Write that the job runs again: a retry after a failure, a retry on request, or RQ's Repeat of a success."""
        job, queue = inflight.job, inflight.queue
        if isinstance(inflight.value, Retry):
            RqResult.create_retried(
                job, job.failure_ttl, inflight.value, pipeline=pipeline, **self._execution(inflight)
            )
        elif inflight.error is None:
            job._result = inflight.value
            job._handle_success(job.get_result_ttl(self.default_result_ttl_s), pipeline, **self._execution(inflight))
        if delay_s:
            pipeline.sadd(queue.redis_queues_keys, queue.key)
            queue._persist_job(job, pipeline, status=JobStatus.SCHEDULED)
            enqueue(pipeline, queue.name, job.id, delay_s=delay_s)
        else:
            queue._enqueue_job(job, pipeline=pipeline, at_front=job.enqueue_at_front_on_retry)

    def _execution(self, inflight: InFlightJob) -> dict[str, Any]:
        return {
            "worker_name": self.leases.worker_name,
            "execution_id": inflight.execution.id,
            "execution_started_at": inflight.execution.created_at,
            "execution_ended_at": inflight.job.ended_at,
        }

    def _write_worker_stats(
        self, ours: Sequence[InFlightJob], current: InFlightJob | None, idle_state: WorkerStatus, pipeline: Pipeline
    ) -> None:
        """Write the worker's own fields, which `rq info` and dashboards show."""
        key = self.leases.worker_key
        ours = [inflight for inflight in ours if not isinstance(inflight.error, Postponed)]
        num_failed = sum(inflight.error is not None for inflight in ours)
        working_s = sum(
            elapsed_s(inflight.job.started_at, inflight.job.ended_at or inflight.job.redis_now()) for inflight in ours
        )
        pipeline.hincrby(key, "successful_job_count", len(ours) - num_failed)
        pipeline.hincrby(key, "failed_job_count", num_failed)
        pipeline.hincrbyfloat(key, "total_working_time", working_s)
        if current is None:
            pipeline.hset(key, "state", idle_state)
            pipeline.hdel(key, "current_job")
        else:
            pipeline.hset(key, "current_job", current.job.id)


def _status(inflight: InFlightJob) -> JobStatus:
    """Return RQ's status of a job that ends."""
    if inflight.error is None:
        return JobStatus.FINISHED
    return JobStatus.STOPPED if isinstance(inflight.error, Stopped) else JobStatus.FAILED
