"""The loop of a worker that keeps many jobs in flight in one process, without a fork.

It replaces rq.Worker: same command line, same keys in Redis, same commands and signals. It does not know what a job
computes (`functions`), how leases work (leases.py), how an end is written (commit.py), how many jobs a worker should
have (claim_plan.py).

Threads, and what each may touch:

    main            the loop; the only one that changes `in_flight`. It waits for no reply of Redis
    links           two: one records ended jobs, with claims; one claims while no job ends, and does the rest
    periodic tasks  heartbeat (leases, registration), scheduler, sweep, a subclass's tasks; reads `in_flight`
    pubsub          RQ's commands and the wake-up channels; posts calls to the main thread
    others          run what jobs compute; their futures post calls to the main thread
"""

import logging
import math
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from redis.client import Pipeline
from redis.exceptions import RedisError
from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT
from rq.timeouts import JobTimeoutException
from rq.worker import WorkerStatus
from rq.worker.base import DequeueStrategy

from scorepool.worker.rq.claim_plan import LOOK_S, ClaimPlan
from scorepool.worker.rq.clock import awake_s, clock_s
from scorepool.worker.rq.commit import ResultCommitter
from scorepool.worker.rq.dead_workers import leases_of_dead
from scorepool.worker.rq.errors import Expired, FatalError, JobError, Stopped
from scorepool.worker.rq.exchange import Exchange, Exchanged, Exchanger
from scorepool.worker.rq.heartbeat_clock import HeartbeatClock
from scorepool.worker.rq.in_flight import InFlightJob
from scorepool.worker.rq.job import Callback, Job, Queue
from scorepool.worker.rq.job_functions import function_of
from scorepool.worker.rq.leases import Claim, Claimed, ClaimedJob, Leases
from scorepool.worker.rq.link import Link
from scorepool.worker.rq.periodic_tasks import PeriodicTask, PeriodicTasks
from scorepool.worker.rq.process import WorkerProcess
from scorepool.worker.rq.progress_connection import socket_timeout
from scorepool.worker.rq.redis_errors import REDIS_UNAVAILABLE, exit_with_message
from scorepool.worker.rq.sweep import Sweep
from scorepool.worker.rq.watchdog import Watchdog, WatchedOperations
from scorepool.worker.rq.wrong_types import drop_wrong_types, is_wrong_type

MAINTENANCE_TIMEOUT_S = 2.0  # of RQ's own cleaners, which call callbacks and so need the main thread
GOODBYE_S = 10.0  # to unregister at the end
SHORT_GOODBYE_S = 0.5  # the same, if Redis has not answered the last exchange


@dataclass(slots=True)
class Reclaimed:
    """What came of a reclaim."""

    num_back: int = 0  # jobs put back on their queues
    to_end: list[ClaimedJob] = field(default_factory=list)  # jobs that this worker must end
    from_silent: bool = False  # silent workers were looked for; not if this worker was silent itself


class Worker(WorkerProcess):
    """The loop, for any kind of job. A subclass overrides `open`, where it fills `functions`."""

    takes_over = False  # take jobs that other workers have claimed and not begun: only jobs that do nothing but compute

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.functions: dict[str, Callable[[Job], object]] = {}  # the job functions that may run, by name
        self.callbacks: dict[str, Callback] = {}  # RQ's on_success, on_failure and on_stopped that may run, by name
        self.in_flight: dict[str, InFlightJob] = {}  # by the key of their lease, in the order of their claims
        self.plan = ClaimPlan()
        self._num_claimed = 0
        self._num_wanted = 0
        self._is_recording = False  # an exchange with ends is under way
        self._is_claiming = False  # an exchange with a claim is under way
        self._is_suspended = False
        self._stopped_because: str | None = None  # set once it claims no more jobs until it is restarted
        self._idle_since = awake_s()  # the time since which no job has been in flight
        self._iteration_started_at: float | None = None  # awake_s(), of the loop; in the future while it waits
        self._reclaim_at = 0.0  # clock_s()
        self._is_starting = True  # no claim was sent
        self._has_reclaimed = False  # jobs of silent workers have been reclaimed once
        self._try_again_at = 0.0  # clock_s(): Redis was away, so no exchange before
        self._backoff_s = 0.1

    @cached_property
    def link(self) -> Link:
        return Link(self._post_call)

    @cached_property
    def recording_link(self) -> Link:
        return Link(self._post_call)

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

    @cached_property
    def exchanger(self) -> Exchanger:
        return Exchanger(self.connection, self.leases, self.committer, self.heartbeat_clock.heard_since)

    # A subclass may override these.

    @property
    def capacity(self) -> int:
        """The most jobs in flight."""
        return self.settings.max_jobs_in_flight

    def num_wanted(self) -> int:
        """Return how many more jobs this worker should have. The loop claims no more than `capacity` allows."""
        return self.capacity

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

    def unregister(self, pipeline: Pipeline) -> None:
        """Remove what `register` wrote."""

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
            watchdog = Watchdog(self.settings.stall_timeout_s, self.watched_operations, self._report_death, self.log)
            heartbeat = PeriodicTask(self._send_heartbeat, every_s=self.settings.lease_s / 5)
            sweep = Sweep(self.connection, self.queue_names(), self.settings.lease_s * 3)
            tasks = [
                heartbeat,
                PeriodicTask(watchdog.check, every_s=min(1.0, watchdog.timeout_s / 5)),
                PeriodicTask(sweep.run, every_s=sweep.every_s, due_at=clock_s() + sweep.every_s),
                *self.periodic_tasks(),
            ]
            self.bootstrap(logging_level, date_format, log_format)
            stack.callback(self._say_goodbye)
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
            self.link.call(partial(self.set_state, WorkerStatus.IDLE), lambda _: None, self._lose_redis)
            try:
                self._run(burst, math.inf if max_jobs is None else max_jobs, max_idle_time or math.inf)
            except SystemExit:  # the second signal came while a job function ran on this thread
                self._release_all()
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
                self._release_all()
            self._maintain()
            self._exchange(max_jobs)
            if self._should_quit(burst, max_jobs, max_idle_s):
                return
            self._wait()

    def _commit_ended(self) -> None:
        """Decide the ends of the jobs that are over. The next exchange writes them."""
        for inflight in self.in_flight.values():
            if inflight.is_over:
                self.committer.decide(inflight)

    def _maintain(self) -> None:
        if self._stopped_because is None and not self._stop_requested and clock_s() >= self._reclaim_at:
            self._reclaim_at = math.inf  # until this one has ended
            self.link.call(self._reclaim, self._take_reclaimed, self._lose_redis)
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
                self.log.warning(
                    "Worker %s: %d jobs come back when their leases expire", self.name, len(self.in_flight)
                )
            reason = "the time to drain is over"
        elif self.in_flight or self._is_claiming:
            return False
        elif self._stop_requested:
            reason = "asked to stop"
        elif self._num_claimed >= max_jobs:
            reason = f"{self._num_claimed} jobs done"
        elif burst and self.plan.queues_are_empty and self._has_reclaimed:
            reason = "suspended" if self._is_suspended else "the queues are empty"
        elif awake_s() - self._idle_since >= max_idle_s:
            reason = f"idle for {max_idle_s:g} seconds"
        else:
            return False
        self.log.info("Worker %s: %s, quitting", self.name, reason)
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
            due_s.append(LOOK_S)
        if not self._is_claiming:
            due_s.append(max(self.plan.due_in_s(self._num_wanted), self._try_again_at - clock_s()))
        if self._drain_deadline is not None:
            due_s += [at - clock_s() for at in (self._release_at, self._drain_deadline) if at > clock_s()]
        return max(0.0, min([1.0, *due_s]))

    # Exchanges with Redis.

    def _exchange(self, max_jobs: float) -> None:
        """Begin to record ended jobs and to claim new ones, together if both are due.

        One of each is under way at a time. A job that ends does not wait for the reply to a claim.
        """
        if (self._is_recording and self._is_claiming) or clock_s() < self._try_again_at:
            return
        ended = [] if self._is_recording else [job for job in self.in_flight.values() if job.is_decided]
        claim = None if self._is_claiming else self._next_claim(max_jobs, len(ended))
        if not ended and claim is None:
            return
        if self._dequeue_strategy == DequeueStrategy.RANDOM:
            random.shuffle(self._ordered_queues)
        exchange = Exchange(
            ended,
            current=next((job for job in self.in_flight.values() if not job.is_over), None),
            idle_state=WorkerStatus.SUSPENDED if self._is_suspended else WorkerStatus.IDLE,
            queues=list(self._ordered_queues),
            claim=claim,
        )
        self._is_recording = self._is_recording or bool(ended)
        self._is_claiming = self._is_claiming or claim is not None
        link = self.recording_link if ended else self.link
        run = partial(self.exchanger.run, exchange)
        link.call(run, partial(self._take_exchanged, exchange), partial(self._lose_exchange, exchange))

    def _next_claim(self, max_jobs: float, num_ending: int) -> Claim | None:
        """Return the claim that is due, also if only because something is sent anyway."""
        self.plan.see(self.in_flight.values(), [key for key, inflight in self.in_flight.items() if inflight.begins()])
        if self._stop_requested or self._stopped_because is not None:
            return None
        num_free = min(self.capacity + num_ending - len(self.in_flight), max_jobs - self._num_claimed)
        self._num_wanted = max(0, int(min(self.num_wanted(), num_free)))
        if not num_ending and not self.plan.is_due(self._num_wanted):
            return None
        running = [inflight for inflight in self.in_flight.values() if not inflight.is_over]
        wanted = Claim(
            max_jobs=self._num_wanted,
            num_in_flight=len(running),
            max_in_flight=min([self.capacity, *(job.job.max_concurrency or self.capacity for job in running)]),
            list_length=self.capacity,
            round_robin=self._dequeue_strategy == DequeueStrategy.ROUND_ROBIN,
            takes_over=self.takes_over,
        )
        return self.plan.claim(wanted, known=self.in_flight)

    def _end_exchange(self, exchange: Exchange) -> None:
        self._is_recording = self._is_recording and not exchange.ended
        self._is_claiming = self._is_claiming and exchange.claim is None

    def _take_exchanged(self, exchange: Exchange, exchanged: Exchanged) -> None:
        self._end_exchange(exchange)
        self._backoff_s = 0.1
        for inflight in exchanged.recorded:
            self.in_flight.pop(inflight.lease_key, None)
            self.plan.end(inflight)
            level = logging.WARNING if isinstance(inflight.error, JobError) else logging.INFO
            self.log.log(level, "job %s: %s", inflight.job.id, inflight.end)
            if inflight.error is None and inflight.job.on_recorded is not None:
                inflight.job.on_recorded()
        for inflight in exchanged.lost:
            self.in_flight.pop(inflight.lease_key, None)
            self.log.warning("job %s: its lease was lost, so its end is not recorded here", inflight.job.id)
        if exchanged.claimed is not None:
            self._take_claimed(exchanged.claimed, exchanged.elapsed_s)

    def _take_claimed(self, claimed: Claimed, elapsed_s: float) -> None:
        self._set_suspended(claimed.is_suspended)
        self.plan.take(claimed, elapsed_s)
        if not claimed.jobs:
            return
        if self._dequeue_strategy == DequeueStrategy.ROUND_ROBIN:
            self.reorder_queues(claimed.jobs[-1].queue)
        self._admit(claimed.jobs)

    def _lose_exchange(self, exchange: Exchange, error: Exception) -> None:
        self._end_exchange(exchange)
        self.plan.reconcile(lease_key for lease_key, inflight in self.in_flight.items() if inflight.has_begun)
        self._lose_redis(error)
        self._release([inflight for inflight in self.exchanger.stuck if inflight.lease_key in self.in_flight])

    def _lose_redis(self, error: Exception) -> None:
        """Wait before the next attempt. Jobs in flight go on, and their ends are kept until Redis takes them.

        Other workers lost Redis as well, so no jobs are reclaimed before all have had time to extend their leases.
        """
        if not (isinstance(error, REDIS_UNAVAILABLE) or (isinstance(error, RedisError) and is_wrong_type(error))):
            raise error
        self.log.error("Redis is away (%s); %d jobs are kept, trying again", error, len(self.in_flight))
        self._reclaim_at = clock_s() + self.settings.lease_s
        self._try_again_at = clock_s() + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, 2.0)

    def _reclaim(self) -> Reclaimed:
        """Take jobs back from dead workers of this machine, and from silent ones. Runs on the link."""
        reclaimed = Reclaimed()
        held = leases_of_dead(self.connection, self.queues, self.name, is_starting=self._is_starting)
        self._is_starting = False
        if self.heartbeat_clock.is_on_time(self.connection.ping):
            reclaimed.from_silent = True
            held.append([])
        for lease_keys in held:
            num_back, to_end = self.leases.reclaim(self.queues, self.settings.crash_limit, lease_keys)
            reclaimed.num_back += num_back
            reclaimed.to_end += to_end
        return reclaimed

    def _take_reclaimed(self, reclaimed: Reclaimed) -> None:
        every_s = self.settings.lease_s / 4
        self._reclaim_at = clock_s() + (every_s if reclaimed.from_silent else min(every_s, 1.0))
        self._has_reclaimed = self._has_reclaimed or reclaimed.from_silent
        if reclaimed.num_back:
            self.log.warning("took %d jobs back from workers that are gone", reclaimed.num_back)
            self.plan.wake()
        self._admit(reclaimed.to_end)

    def _set_suspended(self, is_suspended: bool) -> None:
        if is_suspended != self._is_suspended:
            self._is_suspended = is_suspended
            self.log.info("Worker %s: %s", self.name, "suspended, until `rq resume`" if is_suspended else "resumed")
            awake = WorkerStatus.BUSY if self.in_flight else WorkerStatus.IDLE
            state = WorkerStatus.SUSPENDED if is_suspended else awake
            self.link.call(partial(self.set_state, state), lambda _: None, self._lose_redis)

    # Claimed jobs.

    def _admit(self, claimed_jobs: Sequence[ClaimedJob]) -> None:
        """Start jobs. All are in `in_flight`, where their leases are extended, before the first of them starts."""
        jobs = [InFlightJob.from_claimed(job, self.connection, self.name, self.callbacks) for job in claimed_jobs]
        admitted = [inflight for inflight in jobs if inflight.lease_key not in self.in_flight]
        self.in_flight |= {inflight.lease_key: inflight for inflight in admitted}
        self._num_claimed += len(admitted)
        if self._stop_requested or self._must_release:
            self._release(admitted)
            return
        for inflight in admitted:
            self._start(inflight)

    def _start(self, inflight: InFlightJob) -> None:
        job = inflight.job
        self.log.info("%s: %s (%s)", inflight.queue.name, job.description if self.log_job_description else "", job.id)
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
        self.link.call(self._write_stop, lambda _: None, self._lose_redis)

    def _write_stop(self) -> None:
        self.leases.leave(self.queues)
        self.set_state(WorkerStatus.SUSPENDED)
        with self.connection.pipeline() as pipeline:
            self.register(pipeline)
            pipeline.execute()

    def _stop_job(self, job_id: str) -> None:
        for inflight in self.in_flight.values():
            if inflight.job.id == job_id:
                inflight.fail(Stopped())

    def _wake_up(self) -> None:
        self.plan.wake()

    def _take_leased(self, claimed: ClaimedJob) -> None:
        self._admit([claimed])

    def _lose_messages(self) -> None:
        self.plan.reconcile(lease_key for lease_key, inflight in self.in_flight.items() if inflight.has_begun)

    def _lose_leases(self, lost: Iterable[str]) -> None:
        """Drop jobs whose lease was lost."""
        for lease_key in lost:
            if inflight := self.in_flight.pop(lease_key, None):
                self.log.warning("job %s was taken away", inflight.job.id)
                inflight.abandon()

    def _apply_lease_changes(self, lost: set[str], canceled: set[str]) -> None:
        """Drop jobs whose lease was lost; stop jobs that their owner canceled."""
        self._lose_leases(lost)
        for lease_key in canceled & self.in_flight.keys():
            self.in_flight[lease_key].fail(Stopped())

    # The end.

    def _show_shutdown(self) -> None:
        self.link.call(self._write_shutdown, lambda _: None, self._lose_redis)

    def _write_shutdown(self) -> None:
        self.leases.leave(self.queues)
        self.set_shutdown_requested_date()

    @property
    def _must_release(self) -> bool:
        return self._stopped_because is not None or (self._drain_deadline is not None and clock_s() >= self._release_at)

    def _release_all(self) -> None:
        self._release([inflight for inflight in self.in_flight.values() if not inflight.is_over])

    def _release(self, jobs: Sequence[InFlightJob]) -> None:
        """Put jobs back on the queues, with all their retries."""
        if not jobs:
            return
        for inflight in jobs:
            del self.in_flight[inflight.lease_key]
            inflight.abandon()
        self.log.warning("Worker %s: %d jobs in flight put back", self.name, len(jobs))
        self.link.call(partial(self.leases.release, jobs), lambda _: None, self._lose_redis)

    def _report_death(self) -> None:
        """Let others know that the jobs that were running may have ended this process: see store/lua/reclaim.lua."""
        held = [lease_key for lease_key, inflight in self.in_flight.items() if not inflight.is_over]
        report = partial(self.leases.reclaim, self.queues, self.settings.crash_limit, held)
        self.link.call(report, lambda _: None, lambda _: None)
        self.link.wait(2.0)

    def _say_goodbye(self) -> None:
        """Unregister, if Redis answers in time."""
        is_away = clock_s() < self._try_again_at or self._is_recording or self._is_claiming
        timeout_s = SHORT_GOODBYE_S if is_away else GOODBYE_S
        timeout_s = max(SHORT_GOODBYE_S, min(timeout_s, self._end_at - clock_s() - 2 * SHORT_GOODBYE_S))
        self.link.call(self._unregister, lambda _: None, lambda _: None)
        if not self.link.wait(timeout_s):
            self.log.warning("Worker %s: Redis does not answer, so what it holds of this worker expires", self.name)

    def _unregister(self) -> None:
        """Remove what Redis holds of this worker. Runs on the link."""
        self.leases.leave(self.queues)
        with self.wrong_types.tolerate("unregister"), self.connection.pipeline() as pipeline:
            self.unregister(pipeline)
            pipeline.execute()
        self.teardown()

    # On the thread of the periodic tasks.

    def _send_heartbeat(self) -> None:
        """Show that the worker lives, and extend its leases.

        `list` of a dict's values is atomic, so it needs no lock.
        """
        in_flight = list(self.in_flight.values())
        started_at = awake_s()
        lost, canceled = self.leases.extend(in_flight)
        if in_flight:
            self.exchanger.link_speed.record_round_trip(awake_s() - started_at)
        if lost or canceled:
            self._post_call(partial(self._apply_lease_changes, lost, canceled))
        with self.connection.pipeline() as pipeline:
            self.heartbeat(math.ceil(self.settings.lease_s * 3), pipeline=pipeline)
            self.register(pipeline)
            self.wrong_types.report(drop_wrong_types(self.connection, pipeline))
            pipeline.execute()
        self.heartbeat_clock.record()
