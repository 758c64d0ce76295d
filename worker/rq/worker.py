"""The loop of a worker that keeps many jobs in flight in one process, without a fork.

It replaces rq.Worker: same command line, same keys in Redis, same commands and signals. It does not know what a job
computes (`functions`), and how jobs are claimed, kept and recorded (job_holder.py).

Threads, and what each may touch:

    main            the loop; the only one that changes `in_flight`. It waits for no reply of Redis
    links           two: one records ended jobs, with claims; one claims while no job ends, and does the rest
    periodic tasks  heartbeat (leases, registration), scheduler, sweep, a subclass's tasks; reads `in_flight`
    pubsub          RQ's commands and the wake-up channels; posts calls to the main thread
    others          run what jobs compute; their futures post calls to the main thread
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT
from rq.timeouts import JobTimeoutException
from rq.worker import WorkerStatus
from rq.worker.base import DequeueStrategy

from scorepool.store import logs
from scorepool.store.traces import open_tracer
from scorepool.worker.claims.lease_length import BEATS_PER_LEASE
from scorepool.worker.claims.leases import Claimed, ClaimedJob
from scorepool.worker.claims.queue_group import QueueGroup
from scorepool.worker.machine.keep_awake import KeepAwake
from scorepool.worker.machine.periodic_tasks import PeriodicTask, PeriodicTasks
from scorepool.worker.machine.sleep_hook import SleepHook
from scorepool.worker.machine.watchdog import Watchdog, WatchedOperations
from scorepool.worker.redis_link.progress_connection import socket_timeout
from scorepool.worker.rq.clock import awake_s, clock_s
from scorepool.worker.rq.errors import Expired, FatalError, StartError, Stopped, WorkerError
from scorepool.worker.rq.in_flight import InFlightJob
from scorepool.worker.rq.job import Callback, Job, Queue
from scorepool.worker.rq.job_functions import function_of
from scorepool.worker.rq.job_holder import JobHolder
from scorepool.worker.rq.redis_errors import REDIS_UNAVAILABLE, exit_with_message
from scorepool.worker.rq.sweep import Sweep
from scorepool.worker.version import VERSION

MAINTENANCE_TIMEOUT_S = 2.0  # of RQ's own cleaners, which call callbacks and so need the main thread
MAX_EARLY_STOPS = 256  # commands to stop jobs that may be in the reply to the claim under way
GOODBYE_S = 10.0  # to unregister at the end
SHORT_GOODBYE_S = 0.5  # the same, if Redis has not answered the last exchange


class Worker(JobHolder):
    """The loop, for any kind of job. A subclass overrides `open`, where it fills `functions`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.functions: dict[str, Callable[[Job], object]] = {}  # the job functions that may run, by name
        self.callbacks: dict[str, Callback] = {}  # RQ's on_success, on_failure and on_stopped that may run, by name
        self._early_stops: deque[str] = deque(maxlen=MAX_EARLY_STOPS)  # ids of jobs
        self._idle_since = awake_s()  # the time since which no job has been in flight
        self._iteration_started_at: float | None = None  # awake_s(), of the loop; in the future while it waits

    # A subclass may override these.

    process = "worker"  # its name in log lines

    def log_fields(self) -> dict[str, str]:
        """Return the fields of all its log lines: see store/logs.py."""
        return {"worker": self.name}

    def open(self) -> None:
        """Get ready to work. Called once, after RQ's bootstrap, so never before a fork."""

    def close(self) -> None:
        """Release what `open` acquired. Also called when `open` failed."""

    def rest(self, group: QueueGroup, idle_s: float) -> None:
        """Save what need not be held for these queues. Called now and then while none of their jobs is in flight.

        The last one ended `idle_s` ago.
        """

    def periodic_tasks(self) -> list[PeriodicTask]:
        """Return more tasks to run beside the loop."""
        return []

    def watched_operations(self) -> WatchedOperations:
        """Return what must not take longer than `stall_timeout_s`. A job function has a timeout of its own."""
        return {"one iteration of the loop": None if self._is_interruptible else self._iteration_started_at}

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
            logs.configure(self.process, self.settings.log_format, logging_level.upper(), **self.log_fields())
            self.log.info("scorepool %s starts", VERSION)  # RQ logs its own version, and the process's id
            self._make_parts()
            watchdog = Watchdog(self.settings.stall_timeout_s, self.watched_operations, self._report_death, self.log)
            heartbeat = PeriodicTask(self._send_heartbeat, every_s=self.settings.lease_s / BEATS_PER_LEASE)
            sweep = Sweep(self.connection, self.queue_names(), self.settings.lease_s * 3)
            tasks = [
                heartbeat,
                PeriodicTask(watchdog.check, every_s=min(1.0, watchdog.timeout_s / 5)),
                PeriodicTask(sweep.run, every_s=sweep.every_s, due_at=clock_s() + sweep.every_s),
                *self.periodic_tasks(),
            ]
            if self.settings.keep_awake:
                keep_awake = KeepAwake(lambda: bool(self.in_flight), self.log)
                tasks.append(PeriodicTask(keep_awake.update, every_s=1.0))
                stack.callback(keep_awake.end)
            self.bootstrap(logging_level, date_format, log_format)
            stack.callback(self._say_goodbye)
            self._install_signal_handlers()
            if with_scheduler:
                self._start_scheduler(burst, logging_level, date_format, log_format)
                if not burst:
                    tasks.append(PeriodicTask(self._tick_scheduler, every_s=1.0))
            self.tracer = open_tracer(self.settings, self.process)
            if self.tracer is not None:
                stack.callback(self.tracer.close)
            stack.callback(self.close)
            stack.enter_context(PeriodicTasks(tasks, self.log))
            stack.enter_context(SleepHook(self.hand_back_for_sleep, self.resume_after_sleep, self.log))
            self._start_reclaim()  # before the model is loaded: until then, a dead worker's registration may expire
            with self._interruptible():
                self.open()
            heartbeat.due_at = 0.0  # `register` writes what it serves at once
            self.link.call(partial(self.set_state, WorkerStatus.IDLE), lambda _: None, self._lose_redis)
            try:
                self._run(burst, math.inf if max_jobs is None else max_jobs, max_idle_time or math.inf)
            except (SystemExit, StartError):
                # The second signal came while a job function ran on this thread, or the model is not to be had again.
                self._release()
                raise
            except FatalError:
                self._report_death()
                raise
        return self._num_claimed > 0

    def _run(self, burst: bool, max_jobs: float, max_idle_s: float) -> None:
        while True:
            self._iteration_started_at = awake_s()
            self._commit_ended()
            if self._must_release:
                self._release()
            self._maintain()
            self._exchange(max_jobs)
            if self._should_quit(burst, max_jobs, max_idle_s):
                return
            self._rest()
            self._wait()

    def _rest(self) -> None:
        """Look which queues have no job in flight, and let them rest."""
        for group in self.queue_groups:
            if group.of(self.in_flight.values()):
                group.idle_since = awake_s()
            elif not self._is_claiming:
                self.rest(group, awake_s() - group.idle_since)

    def _commit_ended(self) -> None:
        """Decide the ends of the jobs that are over. The next exchange writes them."""
        for inflight in self.in_flight.values():
            if inflight.is_over and not inflight.is_decided:
                self.committer.decide(inflight)
                self.result_writer.take(inflight)

    def _maintain(self) -> None:
        if self._stopped_because is None and not self._stop_requested and clock_s() >= self._reclaim_at:
            self._start_reclaim()
        if self.should_run_maintenance_tasks and not self._stop_requested and clock_s() >= self._try_again_at:
            try:
                with socket_timeout(MAINTENANCE_TIMEOUT_S):
                    self.run_maintenance_tasks()
            except REDIS_UNAVAILABLE as error:
                self._lose_redis(error)

    def _should_quit(self, burst: bool, max_jobs: float, max_idle_s: float) -> bool:
        """True if the worker ends now."""
        if self._drain_deadline is not None and clock_s() >= self._drain_deadline:
            if self.in_flight:
                self.log.warning("%d jobs come back when their leases expire", len(self.in_flight))
            reason = "the time to drain is over"
        elif self.in_flight or self._is_claiming:
            return False
        elif self._stop_requested:
            reason = "asked to stop"
        elif self._num_claimed >= max_jobs:
            reason = f"{self._num_claimed} jobs done"
        elif burst and self._has_reclaimed and all(group.plan.queues_are_empty for group in self.queue_groups):
            reason = "suspended" if self._is_suspended else "the queues are empty"
        elif awake_s() - self._idle_since >= max_idle_s:
            reason = f"idle for {max_idle_s:g} seconds"
        else:
            return False
        self.log.info("%s, quitting", reason)
        return True

    def _wait(self) -> None:
        """Wait for a call that another thread posted, or for a deadline."""
        timeout_s = self._poll_timeout_s()
        self._iteration_started_at = awake_s() + timeout_s
        for call in self._posted_calls(timeout_s):
            call()
        if self.in_flight:
            self._idle_since = awake_s()

    def _poll_timeout_s(self) -> float:
        due_s = [inflight.check_deadlines() for inflight in self.in_flight.values()]
        if any(inflight.is_over and not inflight.is_decided for inflight in self.in_flight.values()):
            return 0.0
        if any(not inflight.has_begun for inflight in self.in_flight.values()):
            due_s.append(self._look_s)
        if self._may_claim and not self._is_claiming:
            due_in_s = min(group.plan.due_in_s(group.num_wanted) for group in self.queue_groups)
            due_s.append(max(due_in_s, self._try_again_at - clock_s()))
        if self._drain_deadline is not None:
            due_s += [at - clock_s() for at in (self._release_at, self._drain_deadline) if at > clock_s()]
        return max(0.0, min([1.0, *due_s]))

    # Claimed jobs.

    def _admit(self, claimed_jobs: Sequence[ClaimedJob]) -> None:
        """Start jobs. All are in `in_flight`, where their leases are extended, before the first of them starts.

        A job whose end was recorded goes back to its queue if Redis still has its lease: a new master may lack the end.
        A late message or reply brings such a job without a lease, and then nothing happens.
        """
        recorded = [job for job in claimed_jobs if job.lease_key in self._recorded_leases]
        if recorded:
            self.link.call(partial(self.leases.release, recorded), lambda _: None, self._lose_redis)
        known = self.in_flight.keys() | self._recorded_leases
        jobs = [InFlightJob.from_claimed(job, self.connection, self.name, self.callbacks) for job in claimed_jobs]
        admitted = [inflight for inflight in jobs if inflight.lease_key not in known]
        self.in_flight |= {inflight.lease_key: inflight for inflight in admitted}
        self._num_claimed += len(admitted)
        if self._stop_requested or self._must_release:
            self._put_back(admitted)
            return
        for inflight in admitted:
            self._start(inflight)

    def _start(self, inflight: InFlightJob) -> None:
        job = inflight.job
        if job.id in self._early_stops:
            inflight.fail(Stopped())
            return
        description = job.description if self.log_job_description else "a job"
        self.log.info("begins %s, of queue %s", description, inflight.queue.name, extra={"job": job.id})
        timeout_s = max(0, int(job.timeout or Queue.DEFAULT_TIMEOUT))
        if timeout_s:
            error = JobTimeoutException(f"ran longer than its timeout of {job.timeout} s")
            inflight.set_deadline(timeout_s, error, awake_s)
        if job.expires_at is not None:
            inflight.set_deadline(job.expires_at - job.leased_at, Expired(), clock_s)
        try:
            function = function_of(job, self.functions, self.settings.crash_limit)
            death_penalty = self.death_penalty_class(timeout_s, JobTimeoutException, job_id=job.id)
            with self._interruptible(), job.as_current(), death_penalty:
                inflight.run(function)
        except WorkerError:
            raise
        except Exception as error:
            inflight.fail(error)
        if inflight.async_result is not None:
            inflight.async_result.future.add_done_callback(lambda _: self._post_call(inflight.collect))

    def _stop_job(self, job_id: str) -> None:
        jobs = [inflight for inflight in self.in_flight.values() if inflight.job.id == job_id]
        for inflight in jobs:
            inflight.fail(Stopped())
        if not jobs and self._is_claiming:  # the command may have overtaken the reply that brings the job
            self._early_stops.append(job_id)

    def _take_claimed(self, claimed: Claimed) -> None:
        super()._take_claimed(claimed)
        self._early_stops.clear()

    # The end.

    def _show_shutdown(self) -> None:
        if self.in_flight:
            self.log.info(
                "asked to stop: finishes %d jobs for up to %.0f s, then puts the rest back; a second signal puts them "
                "back at once",
                len(self.in_flight),
                max(0.0, self._release_at - clock_s()),
            )
        self.link.call(partial(self._write_shutdown, list(self.in_flight)), lambda _: None, self._lose_redis)

    def _write_shutdown(self, known: Sequence[str]) -> None:
        self.leases.leave(self.queues, known)
        self.set_shutdown_requested_date()

    def _say_goodbye(self) -> None:
        """Unregister, if Redis answers in time."""
        is_away = clock_s() < self._try_again_at or self._is_recording or self._is_claiming
        timeout_s = SHORT_GOODBYE_S if is_away else GOODBYE_S
        timeout_s = max(SHORT_GOODBYE_S, min(timeout_s, self._end_at - clock_s() - 2 * SHORT_GOODBYE_S))
        self.link.call(self._unregister, lambda _: None, lambda _: None)
        if not self.link.wait(timeout_s):
            self.log.warning("Redis does not answer, so what it holds of this worker expires")

    def _unregister(self) -> None:
        """Remove what Redis holds of this worker. Runs on the link, while the main thread waits."""
        self.leases.leave(self.queues, list(self.in_flight))
        with self.wrong_types.tolerate("unregister"), self.connection.pipeline() as pipeline:
            self.unregister(pipeline)
            pipeline.execute()
        self.teardown()
