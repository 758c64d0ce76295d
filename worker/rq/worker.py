"""The loop of a worker that keeps many jobs in flight in one process, without a fork.

It stands where rq.Worker stands: same command line, same keys in Redis, same commands and signals. What it does not
know: what a job computes (`functions`), how leases work (lease.py), how an end is written (record.py).

Threads, and what each may touch:

    main          the loop; the only one that touches flights
    housekeeping  beats (leases, presence), scheduler, a subclass's chores; reads the flights
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
from scorepool.worker.rq.dead_workers import orphans
from scorepool.worker.rq.errors import Expired, FatalError, JobError, StartError, Stopped
from scorepool.worker.rq.in_flight import InFlightJob
from scorepool.worker.rq.job import Callback, Job, Queue
from scorepool.worker.rq.job_functions import function_of
from scorepool.worker.rq.leases import ClaimedJob, Leases
from scorepool.worker.rq.periodic_tasks import PeriodicTask, PeriodicTasks
from scorepool.worker.rq.process import WorkerProcess
from scorepool.worker.rq.watchdog import UnderWay, Watchdog

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
def one_sentence() -> Iterator[None]:
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
        self.flights: dict[str, InFlightJob] = {}  # by the name of their lease, in the order of their claims
        self._num_claimed = 0
        self._is_dry = True  # there is nothing to claim for now
        self._is_suspended = False
        self._idle_since = time.monotonic()  # nothing has been in flight
        self._turn_began_at: float | None = None  # time.monotonic(), of the loop; to come, while it waits
        self._reclaim_at = 0.0
        self._has_reclaimed = False  # it has looked once for jobs of workers that are gone
        self._beaten_at = math.inf  # clock_s() of the last beat
        self._steady_since = -math.inf  # clock_s(): no beat was late since
        self._backoff_s = 0.1

    @cached_property
    def leases(self) -> Leases:
        return Leases(self.connection, self.name, self.key, self.settings.lease_s)

    @cached_property
    def record(self) -> ResultCommitter:
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

    def chores(self) -> list[PeriodicTask]:
        """What else goes on beside the loop."""
        return []

    def under_way(self) -> UnderWay:
        """What must not take longer than `stall_timeout_s`. A job function has its own timeout, on this thread."""
        return {"a turn of the loop": None if self._is_interruptible else self._turn_began_at}

    def show(self, pipeline: Pipeline) -> None:
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
        with one_sentence(), ExitStack() as stack:
            logging_level = logging_level or self.settings.log_level  # RQ's own options come first
            watch = Watchdog(self.settings.stall_timeout_s, self.under_way, self.log)
            beat = PeriodicTask(self._beat, every_s=self.settings.lease_s / 5)
            chores = [beat, PeriodicTask(watch.look, every_s=min(1.0, watch.timeout_s / 5)), *self.chores()]
            self.bootstrap(logging_level, date_format, log_format)
            stack.callback(self.teardown)
            self._share_log()
            self._install_signal_handlers()
            if with_scheduler:
                self._start_scheduler(burst, logging_level, date_format, log_format)
                if not burst:
                    chores.append(PeriodicTask(self._tick_scheduler, every_s=1.0))
            stack.callback(self.close)
            stack.enter_context(PeriodicTasks(chores, self.log))
            with self._interruptible():
                self.open()
            beat.due_at = 0.0  # it says what it serves as soon as it does
            self.leases.expire(orphans(self.connection, self.queues))
            self.set_state(WorkerStatus.IDLE)
            try:
                self._run(burst, math.inf if max_jobs is None else max_jobs, max_idle_time or math.inf)
            except SystemExit:  # the second signal came while a job function ran on this thread
                self._release()
                raise
        return self._num_claimed > 0

    def _run(self, burst: bool, max_jobs: float, max_idle_s: float) -> None:
        while True:
            self._turn_began_at = time.monotonic()
            try:
                self._record_ends()
                if self._drain_by is not None and time.monotonic() >= self._drain_by:
                    self._release()
                self._maintain()
                self._claim(max_jobs)
                if not self.flights and self._is_enough(burst, max_jobs, max_idle_s):
                    return
                self._wait()
                self._backoff_s = 0.1
            except REDIS_UNAVAILABLE as error:
                self._wait_for_redis(error)

    def _record_ends(self) -> None:
        over = [flight for flight in self.flights.values() if flight.is_over]
        if not over:
            return
        still_flying = next((flight for flight in self.flights.values() if not flight.is_over), None)
        rest = WorkerStatus.SUSPENDED if self._is_suspended else WorkerStatus.IDLE
        recorded = set(self.record.end(over, still_flying, rest))
        for flight in over:
            del self.flights[flight.member]
            if flight not in recorded:
                self.log.warning("job %s: its lease was lost, so its end is not recorded here", flight.job.id)
            elif flight.retry_delay_s is not None:
                self.log.info("job %s: again in %d s", flight.job.id, flight.retry_delay_s)
            elif isinstance(flight.error, JobError):
                self.log.warning("job %s: %s", flight.job.id, flight.error.failure.code)
            else:
                self.log.info("job %s: %s", flight.job.id, type(flight.error).__name__ if flight.error else "done")

    def _maintain(self) -> None:
        if time.monotonic() >= self._reclaim_at and self._is_steady():
            self._reclaim_at = time.monotonic() + self.settings.lease_s / 4
            num_back, rows = self.leases.reclaim(self.queues, self.settings.crash_limit)
            self._has_reclaimed = True
            if num_back:
                self.log.warning("took %d jobs back from workers that are gone", num_back)
            self._admit(rows)
        if self.should_run_maintenance_tasks:
            self.run_maintenance_tasks()

    def _is_steady(self) -> bool:
        """Whether beats come in time. Where they do not (Redis, this process or the whole machine stood still), others
        stood still as well, perhaps: nobody's jobs are taken before all have had time to extend their leases."""
        lease_s = self.settings.lease_s
        if clock_s() - self._beaten_at >= lease_s / 2 or clock_s() - self._steady_since <= lease_s:
            return False
        asked_at = clock_s()
        self.connection.ping()  # what is sent while Redis stands still is run once it goes on: not the reclaim
        if clock_s() - asked_at > lease_s / 4:
            self._steady_since = clock_s()
            return False
        return True

    def _claim(self, max_jobs: float) -> None:
        room = min(self.capacity - len(self.flights), max_jobs - self._num_claimed)
        self._is_dry = True
        if room <= 0 or self._stop_requested:
            return
        limit = min([self.capacity, *(flight.job.company or self.capacity for flight in self.flights.values())])
        round_robin = self._dequeue_strategy == DequeueStrategy.ROUND_ROBIN
        if self._dequeue_strategy == DequeueStrategy.RANDOM:
            random.shuffle(self._ordered_queues)
        rows = self.leases.claim(self._ordered_queues, int(room), len(self.flights), limit, self.capacity, round_robin)
        self._show_suspended(rows is None)
        self._is_dry = not rows
        if not rows:
            return
        if round_robin:
            self.reorder_queues(rows[-1].queue)
        self._num_claimed += len(rows)
        self._admit(rows)

    def _show_suspended(self, is_suspended: bool) -> None:
        if is_suspended != self._is_suspended:
            self._is_suspended = is_suspended
            self.log.info("Worker %s: %s", self.name, "suspended, until `rq resume`" if is_suspended else "resumed")
            awake = WorkerStatus.BUSY if self.flights else WorkerStatus.IDLE
            self.set_state(WorkerStatus.SUSPENDED if is_suspended else awake)

    def _is_enough(self, burst: bool, max_jobs: float, max_idle_s: float) -> bool:
        """Whether a worker with nothing in flight is done."""
        if self._stop_requested:
            reason = "told to stop"
        elif self._num_claimed >= max_jobs:
            reason = f"{self._num_claimed} jobs done"
        elif burst and self._is_dry and self._has_reclaimed:
            reason = "suspended" if self._is_suspended else "the queues are empty"
        elif time.monotonic() - self._idle_since >= max_idle_s:
            reason = f"idle for {max_idle_s:g} seconds"
        else:
            return False
        self.log.info("Worker %s: %s, quitting", self.name, reason)
        return True

    def _wait(self) -> None:
        """Until something happens, which is a call that another thread posted, or a deadline."""
        patience_s = self._patience_s()
        self._turn_began_at = time.monotonic() + patience_s
        for call in self._posted(patience_s):
            call()
        if self.flights:
            self._idle_since = time.monotonic()
        for flight in self.flights.values():
            flight.check_deadline()

    def _patience_s(self) -> float:
        if not self._is_dry or any(flight.is_over for flight in self.flights.values()):
            return 0.0
        deadlines = [flight.deadline for flight in self.flights.values() if flight.deadline is not None]
        drain = [] if self._drain_by is None else [self._drain_by]
        return max(0.0, min([POLL_S, *(at - time.monotonic() for at in deadlines + drain)]))

    def _wait_for_redis(self, error: RedisError) -> None:
        """What is in flight goes on, and ends are kept until Redis takes them.

        Others were cut off as we were, so nobody's jobs are reclaimed before all have had time to extend their leases.
        """
        self.log.error("Redis is away (%s); %d jobs are kept, trying again", error, len(self.flights))
        if self._drain_by is not None and time.monotonic() >= self._drain_by:
            raise error  # it is time to go: the end of the leases brings the jobs back
        self._reclaim_at = time.monotonic() + self.settings.lease_s
        self._turn_began_at = time.monotonic() + self._backoff_s
        time.sleep(self._backoff_s)
        self._backoff_s = min(self._backoff_s * 2, 2.0)

    # Jobs that were claimed.

    def _admit(self, rows: list[ClaimedJob]) -> None:
        """All are in `flights`, where their leases are extended, before the first of them starts."""
        started = []
        for row in rows:
            job = Job.from_row(row, self.connection, self.callbacks)
            execution = Execution(row.execution_id, row.job_id, self.connection, self.name)
            job.worker_name, job.started_at, job.last_heartbeat = self.name, execution.created_at, execution.created_at
            flight = InFlightJob(job, row.queue, execution)
            self.flights[flight.member] = flight
            started.append(flight)
        for flight in started:
            self._start(flight)

    def _start(self, flight: InFlightJob) -> None:
        job = flight.job
        self.log.info("%s: %s (%s)", flight.queue.name, job.description if self.log_job_description else "", job.id)
        timeout_s = max(0, int(job.timeout or Queue.DEFAULT_TIMEOUT))
        if timeout_s:
            flight.due_in(timeout_s, JobTimeoutException(f"ran longer than its timeout of {job.timeout} s"))
        if job.expires_at is not None:
            flight.due_in(job.expires_at - job.leased_at, Expired())
        try:
            function = function_of(job, self.functions, self.settings.crash_limit)
            with self._interruptible(), self.death_penalty_class(timeout_s, JobTimeoutException, job_id=job.id):
                flight.run(function)
        except FatalError:
            raise
        except Exception as error:
            flight.fail(error)
        if flight.pending is not None:
            flight.pending.future.add_done_callback(lambda _: self._post(flight.land))

    def _stop_job(self, job_id: str) -> None:
        for flight in self.flights.values():
            if flight.job.id == job_id:
                flight.fail(Stopped())

    def _heed(self, lost: set[str], canceled: set[str]) -> None:
        """What a beat learned about the leases."""
        for member in lost & self.flights.keys():
            self.log.warning("job %s was taken away", self.flights[member].job.id)
            self.flights.pop(member).abandon()
        for member in canceled & self.flights.keys():
            self.flights[member].fail(Stopped())

    def _release(self) -> None:
        """Put everything in flight back in the queues, unspent."""
        flights = list(self.flights.values())
        for flight in flights:
            flight.abandon()
        num_back = self.leases.release(flights)
        self.flights.clear()
        if num_back:
            self.log.warning("Worker %s: %d jobs in flight put back", self.name, num_back)

    # Chores, on the housekeeping thread.

    def _beat(self) -> None:
        """Say that we live, and extend the leases. `list` of a dict's values is atomic, so it needs no lock."""
        with self.connection.pipeline() as pipeline:
            self.heartbeat(math.ceil(self.settings.lease_s * 3), pipeline=pipeline)
            self.show(pipeline)
            had_expired = pipeline.execute()[0] == 1
        if had_expired:
            self.connection.hset(self.key, mapping=self.serialize())  # type: ignore[arg-type]
            worker_registration.register(self)
        lost, canceled = self.leases.extend(list(self.flights.values()))
        if lost or canceled:
            self._post(partial(self._heed, lost, canceled))
        if clock_s() - self._beaten_at > self.settings.lease_s / 2:
            self._steady_since = clock_s()
        self._beaten_at = clock_s()
