"""The loop of a worker that keeps many jobs in flight in one process, without a fork.

It replaces rq.Worker: same command line, same keys in Redis, same commands and signals. It does not know what a job
computes (`functions`), how leases work (leases.py), how an end is written (commit.py).

Threads, and what each may touch:

    main            the loop; the only one that changes `in_flight`
    periodic tasks  heartbeat (leases, registration), scheduler, sweep, a subclass's tasks; reads `in_flight`
    pubsub          RQ's commands and the wake-up channels; posts calls to the main thread
    others          run what jobs compute; their futures post calls to the main thread
"""

import logging
import math
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

from redis.client import Pipeline
from redis.exceptions import RedisError
from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT
from rq.timeouts import JobTimeoutException
from rq.worker import WorkerStatus
from rq.worker.base import DequeueStrategy

from scorepool.worker.rq.commit import ResultCommitter
from scorepool.worker.rq.dead_workers import orphaned_leases
from scorepool.worker.rq.errors import Expired, FatalError, JobError, Stopped
from scorepool.worker.rq.heartbeat_clock import HeartbeatClock
from scorepool.worker.rq.in_flight import InFlightJob
from scorepool.worker.rq.job import Callback, Job, Queue
from scorepool.worker.rq.job_functions import function_of
from scorepool.worker.rq.leases import ClaimedJob, Leases
from scorepool.worker.rq.periodic_tasks import PeriodicTask, PeriodicTasks
from scorepool.worker.rq.process import WorkerProcess
from scorepool.worker.rq.redis_errors import REDIS_UNAVAILABLE, exit_with_message
from scorepool.worker.rq.sweep import Sweep
from scorepool.worker.rq.watchdog import Watchdog, WatchedOperations
from scorepool.worker.rq.wrong_types import drop_wrong_types, is_wrong_type

POLL_S = 1.0  # between looks at the queues when no message wakes the loop


class Worker(WorkerProcess):
    """The loop, for any kind of job. A subclass overrides `open`, where it fills `functions`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.functions: dict[str, Callable[[Job], object]] = {}  # the job functions that may run, by name
        self.callbacks: dict[str, Callback] = {}  # RQ's on_success, on_failure and on_stopped that may run, by name
        self.in_flight: dict[str, InFlightJob] = {}  # by the key of their lease, in the order of their claims
        self._num_claimed = 0
        self._queues_are_empty = True  # the last claim found no more jobs
        self._is_suspended = False
        self._stopped_because: str | None = None  # set once it claims no more jobs until it is restarted
        self._idle_since = time.monotonic()  # the time since which no job has been in flight
        self._iteration_started_at: float | None = None  # time.monotonic(), of the loop; in the future while it waits
        self._reclaim_at = 0.0
        self._has_reclaimed = False  # jobs of dead workers have been reclaimed once
        self._backoff_s = 0.1

    @cached_property
    def leases(self) -> Leases:
        return Leases(self.connection, self.name, self.key, self.settings.lease_s, self.wrong_types)

    @cached_property
    def heartbeat_clock(self) -> HeartbeatClock:
        return HeartbeatClock(self.settings.lease_s)

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

    # A subclass may override these.

    @property
    def capacity(self) -> int:
        """The most jobs in flight."""
        return self.settings.max_jobs_in_flight

    def open(self) -> None:
        """Get ready to work. Called once, after RQ's bootstrap, so never before a fork."""

    def close(self) -> None:
        """Release what `open` acquired. Also called when `open` failed."""

    def periodic_tasks(self) -> list[PeriodicTask]:
        """Return more tasks to run beside the loop."""
        return []

    def watched_operations(self) -> WatchedOperations:
        """Return what must not take longer than `stall_timeout_s`. A job function has a timeout of its own."""
        return {"one iteration of the loop": None if self._is_interruptible else self._iteration_started_at}

    def register(self, pipeline: Pipeline) -> None:
        """Write what this worker serves, with every heartbeat."""

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
        """Run until asked to stop; return whether there was any job.

        Raises FatalError, or SystemExit with one sentence.
        """
        self._dequeue_strategy = dequeue_strategy
        self._num_claimed = 0
        with exit_with_message(), ExitStack() as stack:
            logging_level = logging_level or self.settings.log_level  # RQ's own options take precedence
            watchdog = Watchdog(self.settings.stall_timeout_s, self.watched_operations, self.log)
            heartbeat = PeriodicTask(self._send_heartbeat, every_s=self.settings.lease_s / 5)
            sweep = Sweep(self.connection, self.queue_names(), self.settings.lease_s * 3)
            tasks = [
                heartbeat,
                PeriodicTask(watchdog.check, every_s=min(1.0, watchdog.timeout_s / 5)),
                PeriodicTask(sweep.run, every_s=sweep.every_s, due_at=time.monotonic() + sweep.every_s),
                *self.periodic_tasks(),
            ]
            self.bootstrap(logging_level, date_format, log_format)
            stack.callback(self.teardown)
            self._share_log()
            self._install_signal_handlers()
            if with_scheduler:
                self._start_scheduler(burst, logging_level, date_format, log_format)
                if not burst:
                    tasks.append(PeriodicTask(self._tick_scheduler, every_s=1.0))
            stack.callback(self.close)
            stack.enter_context(PeriodicTasks(tasks, self.log))
            with self._interruptible():
                self.open()
            heartbeat.due_at = 0.0  # `register` writes what it serves at once
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
                if self._stopped_because is not None:
                    self._release()
                self._commit_ended()
                if self._drain_deadline is not None and time.monotonic() >= self._drain_deadline:
                    self._release()
                self._maintain()
                self._claim(max_jobs)
                if not self.in_flight and self._should_quit(burst, max_jobs, max_idle_s):
                    return
                self._wait()
                self._backoff_s = 0.1
            except RedisError as error:
                if not (isinstance(error, REDIS_UNAVAILABLE) or is_wrong_type(error)):
                    raise
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
            if inflight in recorded:
                level = logging.WARNING if isinstance(inflight.error, JobError) else logging.INFO
                self.log.log(level, "job %s: %s", inflight.job.id, inflight.end)
                if inflight.error is None and inflight.job.on_recorded is not None:
                    inflight.job.on_recorded()
            else:
                self.log.warning("job %s: its lease was lost, so its end is not recorded here", inflight.job.id)

    def _maintain(self) -> None:
        is_due = self._stopped_because is None and time.monotonic() >= self._reclaim_at
        if is_due and self.heartbeat_clock.is_on_time(self.connection.ping):
            self._reclaim_at = time.monotonic() + self.settings.lease_s / 4
            num_back, claimed = self.leases.reclaim(self.queues, self.settings.crash_limit)
            self._has_reclaimed = True
            if num_back:
                self.log.warning("took %d jobs back from workers that are gone", num_back)
            self._admit(claimed)
        if self.should_run_maintenance_tasks:
            self.run_maintenance_tasks()

    def _claim(self, max_jobs: float) -> None:
        num_free = min(self.capacity - len(self.in_flight), max_jobs - self._num_claimed)
        self._queues_are_empty = True
        if num_free <= 0 or self._stop_requested or self._stopped_because is not None:
            return
        limits = [inflight.job.max_concurrency or self.capacity for inflight in self.in_flight.values()]
        round_robin = self._dequeue_strategy == DequeueStrategy.ROUND_ROBIN
        if self._dequeue_strategy == DequeueStrategy.RANDOM:
            random.shuffle(self._ordered_queues)
        claimed = self.leases.claim(
            self._ordered_queues,
            int(num_free),
            len(self.in_flight),
            min([self.capacity, *limits]),
            self.capacity,
            round_robin,
        )
        self._set_suspended(claimed is None)
        self._queues_are_empty = not claimed
        if not claimed:
            return
        if round_robin:
            self.reorder_queues(claimed[-1].queue)
        self._num_claimed += len(claimed)
        self._admit(claimed)

    def _set_suspended(self, is_suspended: bool) -> None:
        if is_suspended != self._is_suspended:
            self._is_suspended = is_suspended
            self.log.info("Worker %s: %s", self.name, "suspended, until `rq resume`" if is_suspended else "resumed")
            awake = WorkerStatus.BUSY if self.in_flight else WorkerStatus.IDLE
            self.set_state(WorkerStatus.SUSPENDED if is_suspended else awake)

    def _should_quit(self, burst: bool, max_jobs: float, max_idle_s: float) -> bool:
        """True if a worker with nothing in flight ends now."""
        if self._stop_requested:
            reason = "asked to stop"
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
        """Wait for a call that another thread posted, or for a deadline."""
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
        """Wait before the next attempt. Jobs in flight go on, and their ends are kept until Redis takes them.

        Other workers lost Redis as well, so no jobs are reclaimed before all have had time to extend their leases.
        """
        self.log.error("Redis is away (%s); %d jobs are kept, trying again", error, len(self.in_flight))
        if self._drain_deadline is not None and time.monotonic() >= self._drain_deadline:
            raise error  # the process ends now: the jobs come back when the leases expire
        self._reclaim_at = time.monotonic() + self.settings.lease_s
        self._iteration_started_at = time.monotonic() + self._backoff_s
        time.sleep(self._backoff_s)
        self._backoff_s = min(self._backoff_s * 2, 2.0)

    # Claimed jobs.

    def _admit(self, claimed_jobs: list[ClaimedJob]) -> None:
        """Start jobs. All are in `in_flight`, where their leases are extended, before the first of them starts."""
        jobs = [InFlightJob.from_claimed(job, self.connection, self.name, self.callbacks) for job in claimed_jobs]
        admitted = [inflight for inflight in jobs if inflight.lease_key not in self.in_flight]
        self.in_flight |= {inflight.lease_key: inflight for inflight in admitted}
        for inflight in admitted:
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
            death_penalty = self.death_penalty_class(timeout_s, JobTimeoutException, job_id=job.id)
            with self._interruptible(), job.as_current(), death_penalty:
                inflight.run(function)
        except FatalError:
            raise
        except Exception as error:
            inflight.fail(error)
        if inflight.async_result is not None:
            inflight.async_result.future.add_done_callback(lambda _: self._post_call(inflight.collect))

    def stop_claiming(self, reason: str) -> None:
        """Claim no more jobs until the process is restarted, and put those in flight back. Any thread may call it.

        The process stays alive, so that it can be seen with its reason.
        """
        self._stopped_because = reason
        self._post_call(self._show_stop)

    def _show_stop(self) -> None:
        self.log.error("Worker %s claims no more jobs until it is restarted: %s", self.name, self._stopped_because)
        self.set_state(WorkerStatus.SUSPENDED)
        with self.connection.pipeline() as pipeline:
            self.register(pipeline)
            pipeline.execute()

    def _stop_job(self, job_id: str) -> None:
        for inflight in self.in_flight.values():
            if inflight.job.id == job_id:
                inflight.fail(Stopped())

    def _apply_lease_changes(self, lost: set[str], canceled: set[str]) -> None:
        """Drop jobs whose lease was lost; stop jobs that their owner canceled."""
        for lease_key in lost & self.in_flight.keys():
            self.log.warning("job %s was taken away", self.in_flight[lease_key].job.id)
            self.in_flight.pop(lease_key).abandon()
        for lease_key in canceled & self.in_flight.keys():
            self.in_flight[lease_key].fail(Stopped())

    def _release(self) -> None:
        """Put everything in flight back on the queues, with all its retries."""
        jobs = list(self.in_flight.values())
        for inflight in jobs:
            inflight.abandon()
        num_back = self.leases.release(jobs)
        self.in_flight.clear()
        if num_back:
            self.log.warning("Worker %s: %d jobs in flight put back", self.name, num_back)

    # On the thread of the periodic tasks.

    def _send_heartbeat(self) -> None:
        """Show that the worker lives, and extend its leases.

        `list` of a dict's values is atomic, so it needs no lock.
        """
        lost, canceled = self.leases.extend(list(self.in_flight.values()))
        if lost or canceled:
            self._post_call(partial(self._apply_lease_changes, lost, canceled))
        with self.connection.pipeline() as pipeline:
            self.heartbeat(math.ceil(self.settings.lease_s * 3), pipeline=pipeline)
            self.register(pipeline)
            self.wrong_types.report(drop_wrong_types(self.connection, pipeline))
            pipeline.execute()
        self.heartbeat_clock.record()
