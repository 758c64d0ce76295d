"""The loop of a worker that keeps many jobs in flight in one process, without a fork.

It stands where rq.Worker stands: same command line, same keys in Redis, same commands and signals. What it does not
know: what a job computes (`functions`), how leases work (lease.py), how an end is written (record.py).

Threads, and what each may touch:

    main          the loop; the only one that touches jobs
    housekeeping  beats (leases, presence), scheduler, a subclass's periodic_tasks; reads the jobs
    pubsub        RQ's commands and the bell; posts calls to the main thread
    others        run what jobs compute; their futures post calls to the main thread
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

from redis.client import Pipeline
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    ExecAbortError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError
from rq import worker_registration
from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT
from rq.executions import Execution
from rq.timeouts import JobTimeoutException
from rq.worker import WorkerStatus
from rq.worker.base import DequeueStrategy

from scorepool.store import SettingsError
from scorepool.worker.rq.commit import ResultCommitter
from scorepool.worker.rq.dead_workers import orphaned_leases
from scorepool.worker.rq.errors import Expired, FatalError, JobError, StartError, Stopped
from scorepool.worker.rq.in_flight import InFlightJob
from scorepool.worker.rq.job import Callback, Job, Queue
from scorepool.worker.rq.job_functions import function_of
from scorepool.worker.rq.leases import ClaimedJob, Leases
from scorepool.worker.rq.periodic_tasks import PeriodicTask, PeriodicTasks
from scorepool.worker.rq.process import WorkerProcess
from scorepool.worker.rq.watchdog import Watchdog, WatchedOperations

POLL_S = 1.0  # between looks at the queues when no bell rings
# Redis is away, or takes no commands for a while (connection.Refusing): what is in flight is kept, and tried again.
# ExecAbortError: it began to refuse them within a transaction, of which it has done nothing. NoScriptError: it forgot a
# script as soon as it was told.
REDIS_UNAVAILABLE = (
    *(RedisConnectionError, RedisTimeoutError, ReadOnlyError, OutOfMemoryError),
    *(ExecAbortError, NoScriptError),
)


def clock_s() -> float:
    """Also counts the time that a Mac sleeps, as Redis does for the leases; time.monotonic() does not."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


@contextmanager
def exit_with_message() -> Iterator[None]:
    """What keeps a worker from starting, or from leaving in order, is its user's to mend: told in one sentence, with
    exit status 1."""
    try:
        yield
    except (SettingsError, StartError) as error:
        raise SystemExit(f"scorepool: {error}") from None
    except (
        *REDIS_UNAVAILABLE,
        NoPermissionError,
    ) as error:  # trouble at the start or at the end: in between the loop goes on
        raise SystemExit(f"scorepool: Redis: {error}") from None


class Worker(WorkerProcess):
    """A subclass says what the jobs compute: it overrides `open`, where it fills `functions`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.functions: dict[str, Callable[[Job], object]] = {}  # the job functions that may run, by name
        self.callbacks: dict[str, Callback] = {}  # RQ's on_success, on_failure and on_stopped that may run, by name
        self.in_flight: dict[str, InFlightJob] = {}  # by the name of their lease, in the order of their claims
        self._num_claimed = 0
        self._queues_are_empty = True  # there is nothing to claim for now
        self._is_suspended = False
        self._idle_since = time.monotonic()  # nothing has been in flight
        self._iteration_started_at: float | None = None  # time.monotonic(), of the loop; to come, while it waits
        self._reclaim_at = 0.0
        self._has_reclaimed = False  # it has looked once for jobs of workers that are gone
        self._heartbeat_at = math.inf  # clock_s() of the last beat
        self._on_time_since = -math.inf  # clock_s(): no beat was late since
        self._backoff_s = 0.1

    @cached_property
    def leases(self) -> Leases:
        return Leases(self.connection, self.name, self.key, self.settings.lease_s)

    @cached_property
    def committer(self) -> ResultCommitter:
        return ResultCommitter(
            self.connection,
            self.leases,
            self.default_result_ttl,
            self.death_penalty_class,
            self.handle_exception,
            self.log,
        )

    # What a subclass may replace.

    @property
    def capacity(self) -> int:
        """Jobs in flight."""
        return self.settings.max_jobs_in_flight

    def open(self) -> None:
        """Make ready to work: called once, after RQ's bootstrap, so never before a fork."""

    def close(self) -> None:
        """What was opened; also called when `open` failed."""

    def periodic_tasks(self) -> list[PeriodicTask]:
        """What else goes on beside the loop."""
        return []

    def watched_operations(self) -> WatchedOperations:
        """What must not take longer than `stall_timeout_s`. A job function has its own timeout, on this thread."""
        return {"a turn of the loop": None if self._is_interruptible else self._iteration_started_at}

    def register(self, pipeline: Pipeline) -> None:
        """Say in Redis what this worker serves, with every beat."""

    # The loop.

    def work(
        self,
        burst: bool = False,
        logging_level: str | None = None,
        date_format: str = DEFAULT_LOGGING_DATE_FORMAT,
        log_format: str = DEFAULT_LOGGING_FORMAT,
        max_jobs: int | None = None,
        max_idle_time: int | None = None,
        with_scheduler: bool = False,
        dequeue_strategy: DequeueStrategy = DequeueStrategy.DEFAULT,
    ) -> bool:
        """Returns whether there was any job. Raises what must end the process: Fault, or SystemExit with a sentence."""
        self._dequeue_strategy = dequeue_strategy
        self._num_claimed = 0
        with exit_with_message(), ExitStack() as stack:
            logging_level = logging_level or self.settings.log_level  # RQ's own options come first
            watch = Watchdog(self.settings.stall_timeout_s, self.watched_operations, self.log)
            heartbeat = PeriodicTask(self._send_heartbeat, every_s=self.settings.lease_s / 5)
            periodic_tasks = [
                heartbeat,
                PeriodicTask(watch.check, every_s=min(1.0, watch.timeout_s / 5)),
                *self.periodic_tasks(),
            ]
            self.bootstrap(logging_level, date_format, log_format)
            stack.callback(self.teardown)
            self._share_log()
            self._install_signal_handlers()
            if with_scheduler:
                self._start_scheduler(burst, logging_level, date_format, log_format)
                if not burst:
                    periodic_tasks.append(PeriodicTask(self._tick_scheduler, every_s=1.0))
            stack.callback(self.close)
            stack.enter_context(PeriodicTasks(periodic_tasks, self.log))
            with self._interruptible():
                self.open()
            heartbeat.due_at = 0.0  # it says what it serves as soon as it does
            self.leases.expire(orphaned_leases(self.connection, self.queues))
            self.set_state(WorkerStatus.IDLE)
            try:
                self._run(burst, math.inf if max_jobs is None else max_jobs, max_idle_time or math.inf)
            except SystemExit:  # the second signal came while a job function ran on this thread
                self._release()
                raise
        return self._num_claimed > 0

    def _run(self, burst: bool, max_jobs: float, max_idle_s: float) -> None:
        while True:
            self._iteration_started_at = time.monotonic()
            try:
                self._commit_ended()
                if self._drain_deadline is not None and time.monotonic() >= self._drain_deadline:
                    self._release()
                self._maintain()
                self._claim(max_jobs)
                if not self.in_flight and self._should_quit(burst, max_jobs, max_idle_s):
                    return
                self._wait()
                self._backoff_s = 0.1
            except REDIS_UNAVAILABLE as error:
                self._wait_for_redis(error)

    def _commit_ended(self) -> None:
        over = [inflight for inflight in self.in_flight.values() if inflight.is_over]
        if not over:
            return
        current = next((inflight for inflight in self.in_flight.values() if not inflight.is_over), None)
        idle_state = WorkerStatus.SUSPENDED if self._is_suspended else WorkerStatus.IDLE
        recorded = set(self.committer.commit(over, current, idle_state))
        for inflight in over:
            del self.in_flight[inflight.lease_key]
            if inflight not in recorded:
                self.log.warning("job %s: its lease was lost, so its end is not recorded here", inflight.job.id)
            elif inflight.retry_delay_s is not None:
                self.log.info("job %s: again in %d s", inflight.job.id, inflight.retry_delay_s)
            elif isinstance(inflight.error, JobError):
                self.log.warning("job %s: %s", inflight.job.id, inflight.error.failure.code)
            else:
                self.log.info(
                    "job %s: %s", inflight.job.id, type(inflight.error).__name__ if inflight.error else "done"
                )

    def _maintain(self) -> None:
        if time.monotonic() >= self._reclaim_at and self._heartbeats_are_on_time():
            self._reclaim_at = time.monotonic() + self.settings.lease_s / 4
            num_back, rows = self.leases.reclaim(self.queues, self.settings.crash_limit)
            self._has_reclaimed = True
            if num_back:
                self.log.warning("took %d jobs back from workers that are gone", num_back)
            self._admit(rows)
        if self.should_run_maintenance_tasks:
            self.run_maintenance_tasks()

    def _heartbeats_are_on_time(self) -> bool:
        """Whether beats come in time. Where they do not (Redis, this process or the whole machine stood still), others
        stood still as well, perhaps: nobody's jobs are taken before all have had time to extend their leases."""
        lease_s = self.settings.lease_s
        if clock_s() - self._heartbeat_at >= lease_s / 2 or clock_s() - self._on_time_since <= lease_s:
            return False
        asked_at = clock_s()
        self.connection.ping()  # what is sent while Redis stands still is run once it goes on: not the reclaim
        if clock_s() - asked_at > lease_s / 4:
            self._on_time_since = clock_s()
            return False
        return True

    def _claim(self, max_jobs: float) -> None:
        room = min(self.capacity - len(self.in_flight), max_jobs - self._num_claimed)
        self._queues_are_empty = True
        if room <= 0 or self._stop_requested:
            return
        limit = min(
            [self.capacity, *(inflight.job.max_concurrency or self.capacity for inflight in self.in_flight.values())]
        )
        round_robin = self._dequeue_strategy == DequeueStrategy.ROUND_ROBIN
        if self._dequeue_strategy == DequeueStrategy.RANDOM:
            random.shuffle(self._ordered_queues)
        rows = self.leases.claim(
            self._ordered_queues, int(room), len(self.in_flight), limit, self.capacity, round_robin
        )
        self._set_suspended(rows is None)
        self._queues_are_empty = not rows
        if not rows:
            return
        if round_robin:
            self.reorder_queues(rows[-1].queue)
        self._num_claimed += len(rows)
        self._admit(rows)

    def _set_suspended(self, is_suspended: bool) -> None:
        if is_suspended != self._is_suspended:
            self._is_suspended = is_suspended
            self.log.info("Worker %s: %s", self.name, "suspended, until `rq resume`" if is_suspended else "resumed")
            awake = WorkerStatus.BUSY if self.in_flight else WorkerStatus.IDLE
            self.set_state(WorkerStatus.SUSPENDED if is_suspended else awake)

    def _should_quit(self, burst: bool, max_jobs: float, max_idle_s: float) -> bool:
        """Whether a worker with nothing in flight is done."""
        if self._stop_requested:
            reason = "told to stop"
        elif self._num_claimed >= max_jobs:
            reason = f"{self._num_claimed} jobs done"
        elif burst and self._queues_are_empty and self._has_reclaimed:
            reason = "suspended" if self._is_suspended else "the queues are empty"
        elif time.monotonic() - self._idle_since >= max_idle_s:
            reason = f"idle for {max_idle_s:g} seconds"
        else:
            return False
        self.log.info("Worker %s: %s, quitting", self.name, reason)
        return True

    def _wait(self) -> None:
        """Until something happens, which is a call that another thread posted, or a deadline."""
        timeout_s = self._poll_timeout_s()
        self._iteration_started_at = time.monotonic() + timeout_s
        for call in self._posted_calls(timeout_s):
            call()
        if self.in_flight:
            self._idle_since = time.monotonic()
        for inflight in self.in_flight.values():
            inflight.check_deadline()

    def _poll_timeout_s(self) -> float:
        if not self._queues_are_empty or any(inflight.is_over for inflight in self.in_flight.values()):
            return 0.0
        deadlines = [inflight.deadline for inflight in self.in_flight.values() if inflight.deadline is not None]
        drain = [] if self._drain_deadline is None else [self._drain_deadline]
        return max(0.0, min([POLL_S, *(at - time.monotonic() for at in deadlines + drain)]))

    def _wait_for_redis(self, error: RedisError) -> None:
        """What is in flight goes on, and ends are kept until Redis takes them.

        Others were cut off as we were, so nobody's jobs are reclaimed before all have had time to extend their leases.
        """
        self.log.error("Redis is away (%s); %d jobs are kept, trying again", error, len(self.in_flight))
        if self._drain_deadline is not None and time.monotonic() >= self._drain_deadline:
            raise error  # it is time to go: the end of the leases brings the jobs back
        self._reclaim_at = time.monotonic() + self.settings.lease_s
        self._iteration_started_at = time.monotonic() + self._backoff_s
        time.sleep(self._backoff_s)
        self._backoff_s = min(self._backoff_s * 2, 2.0)

    # Jobs that were claimed.

    def _admit(self, rows: list[ClaimedJob]) -> None:
        """All are in `jobs`, where their leases are extended, before the first of them starts."""
        started = []
        for row in rows:
            job = Job.from_claimed(row, self.connection, self.callbacks)
            execution = Execution(row.execution_id, row.job_id, self.connection, self.name)
            job.worker_name, job.started_at, job.last_heartbeat = self.name, execution.created_at, execution.created_at
            inflight = InFlightJob(job, row.queue, execution)
            self.in_flight[inflight.lease_key] = inflight
            started.append(inflight)
        for inflight in started:
            self._start(inflight)

    def _start(self, inflight: InFlightJob) -> None:
        job = inflight.job
        self.log.info("%s: %s (%s)", inflight.queue.name, job.description if self.log_job_description else "", job.id)
        timeout_s = max(0, int(job.timeout or Queue.DEFAULT_TIMEOUT))
        if timeout_s:
            inflight.set_deadline(timeout_s, JobTimeoutException(f"ran longer than its timeout of {job.timeout} s"))
        if job.expires_at is not None:
            inflight.set_deadline(job.expires_at - job.leased_at, Expired())
        try:
            function = function_of(job, self.functions, self.settings.crash_limit)
            with self._interruptible(), self.death_penalty_class(timeout_s, JobTimeoutException, job_id=job.id):
                inflight.run(function)
        except FatalError:
            raise
        except Exception as error:
            inflight.fail(error)
        if inflight.async_result is not None:
            inflight.async_result.future.add_done_callback(lambda _: self._post(inflight.collect))

    def _stop_job(self, job_id: str) -> None:
        for inflight in self.in_flight.values():
            if inflight.job.id == job_id:
                inflight.fail(Stopped())

    def _apply_lease_changes(self, lost: set[str], canceled: set[str]) -> None:
        """What a beat learned about the leases."""
        for lease_key in lost & self.in_flight.keys():
            self.log.warning("job %s was taken away", self.in_flight[lease_key].job.id)
            self.in_flight.pop(lease_key).abandon()
        for lease_key in canceled & self.in_flight.keys():
            self.in_flight[lease_key].fail(Stopped())

    def _release(self) -> None:
        """Put everything in flight back in the queues, unspent."""
        jobs = list(self.in_flight.values())
        for inflight in jobs:
            inflight.abandon()
        num_back = self.leases.release(jobs)
        self.in_flight.clear()
        if num_back:
            self.log.warning("Worker %s: %d jobs in flight put back", self.name, num_back)

    # Chores, on the housekeeping thread.

    def _send_heartbeat(self) -> None:
        """Say that we live, and extend the leases. `list` of a dict's values is atomic, so it needs no lock."""
        with self.connection.pipeline() as pipeline:
            self.heartbeat(math.ceil(self.settings.lease_s * 3), pipeline=pipeline)
            self.register(pipeline)
            had_expired = pipeline.execute()[0] == 1
        if had_expired:
            self.connection.hset(self.key, mapping=self.serialize())  # type: ignore[arg-type]
            worker_registration.register(self)
        lost, canceled = self.leases.extend(list(self.in_flight.values()))
        if lost or canceled:
            self._post(partial(self._apply_lease_changes, lost, canceled))
        if clock_s() - self._heartbeat_at > self.settings.lease_s / 2:
            self._on_time_since = clock_s()
        self._heartbeat_at = clock_s()
