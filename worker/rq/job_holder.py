"""A worker as the holder of jobs: it claims them, keeps their leases, records their ends and gives them back.

It does not know how jobs run, or when the process ends (worker.py). All methods are for the main thread, except where
they say so; the main thread waits for no reply of Redis, because two links talk to it (link.py).
"""

import logging
import math
import random
from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import Event
from typing import Any

from redis.client import Pipeline
from redis.exceptions import RedisError
from rq.worker import WorkerStatus
from rq.worker.base import DequeueStrategy

from scorepool.store.outage import Outage
from scorepool.store.result_store import ResultStore, inline_result_bytes, open_result_store
from scorepool.store.traces import Tracer
from scorepool.worker.claims.claim_plan import ClaimPlan
from scorepool.worker.claims.dead_workers import leases_of_dead
from scorepool.worker.claims.heartbeat_clock import HeartbeatClock
from scorepool.worker.claims.leases import Claim, Claimed, ClaimedJob, Leases
from scorepool.worker.claims.queue_group import QueueGroup, QueueGroups
from scorepool.worker.redis_link.link import Link
from scorepool.worker.redis_link.wrong_types import drop_wrong_types, is_wrong_type
from scorepool.worker.rq.clock import awake_s, clock_s
from scorepool.worker.rq.commit import ResultCommitter
from scorepool.worker.rq.errors import JobError, Stopped
from scorepool.worker.rq.exchange import Exchange, Exchanged, Exchanger
from scorepool.worker.rq.in_flight import InFlightJob
from scorepool.worker.rq.job_spans import trace_job
from scorepool.worker.rq.process import WorkerProcess
from scorepool.worker.rq.redis_errors import REDIS_UNAVAILABLE
from scorepool.worker.rq.result_writer import ResultWriter

MAX_LATE = 256  # jobs that end while a message or a reply about them is under way
SLEEP_TIMEOUT_S = 10.0  # to put jobs back before the Mac sleeps; macOS waits for 30 s


@dataclass(slots=True)
class Reclaimed:
    """What came of a reclaim."""

    num_back: int = 0  # jobs put back on their queues
    to_end: list[ClaimedJob] = field(default_factory=list)  # jobs that this worker must end
    from_silent: bool = False  # silent workers were looked for; not if this worker was silent itself


class JobHolder(WorkerProcess):
    """The part of a worker that holds jobs. A subclass defines `_admit`, which starts them."""

    keeps_results = False  # its jobs end with results, which may be too large for Redis
    takes_over = False  # take jobs that other workers have claimed and not begun: only jobs that do nothing but compute

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.in_flight: dict[str, InFlightJob] = {}  # by the key of their lease, in the order of their claims
        self.queue_groups = QueueGroups([QueueGroup(self.queue_names())])  # a subclass may divide them in `open`
        self._recorded_leases: deque[str] = deque(maxlen=MAX_LATE)  # a late message or reply may bring them again
        self._num_claimed = 0
        self._is_recording = False  # an exchange with ends is under way
        self._is_claiming = False  # an exchange with a claim is under way
        self._is_suspended = False
        self._stopped_because: str | None = None  # set once it claims no more jobs until it is restarted
        self._is_going_to_sleep = False  # the Mac: it claims nothing until it is awake again
        self._reclaim_at = 0.0  # clock_s()
        self._is_starting = True  # no claim was sent, so leases under its name are those of a predecessor
        self._look_at = 0.0  # clock_s(): whether claimed jobs have begun
        self._has_reclaimed = False  # jobs of silent workers have been reclaimed once
        self._try_again_at = 0.0  # clock_s(): Redis was away, so no exchange before
        self._backoff_s = 0.1
        self._outage = Outage(self.log)
        self.tracer: Tracer | None = None  # set when the worker starts

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

    @cached_property
    def result_store(self) -> ResultStore | None:
        """The store of results that are too large for Redis. The first use raises SettingsError."""
        return open_result_store(self.settings) if self.keeps_results else None

    @cached_property
    def result_writer(self) -> ResultWriter:
        """What writes large results. The first use raises SettingsError."""
        return ResultWriter(
            self.connection,
            self.result_store,
            inline_result_bytes(self.settings),
            self._post_call,
            self.in_flight.__contains__,
            self.log,
        )

    def _make_parts(self) -> None:
        """Make the parts above before a thread asks for one: from Python 3.12 on two threads may each make their own.

        Raises SettingsError if the store of large results cannot be used.
        """
        _ = self.link, self.recording_link, self.exchanger, self.result_writer

    # A subclass may override these.

    @property
    def capacity(self) -> int:
        """The most jobs in flight."""
        return self.settings.max_jobs_in_flight

    def num_wanted(self, group: QueueGroup) -> int:
        """Return how many more jobs of these queues this worker should have.

        The loop claims no more than `capacity` allows.
        """
        return self.capacity

    def excluded_owners(self, group: QueueGroup) -> AbstractSet[str]:
        """Return the owners whose jobs are not claimed for now: see ClaimPlan.see."""
        return frozenset()

    def register(self, pipeline: Pipeline) -> None:
        """Write what this worker serves, with every heartbeat."""

    def unregister(self, pipeline: Pipeline) -> None:
        """Remove what `register` wrote."""

    def _admit(self, claimed_jobs: Sequence[ClaimedJob]) -> None:
        """Take jobs that were leased to this worker, and start them."""
        raise NotImplementedError

    # Exchanges with Redis.

    def _exchange(self, max_jobs: float) -> None:
        """Begin to record ended jobs and to claim new ones, together if both are due.

        One of each is under way at a time. A job that ends does not wait for the reply to a claim.
        """
        if (self._is_recording and self._is_claiming) or clock_s() < self._try_again_at:
            return
        ended = [] if self._is_recording else self._recordable()
        group = None if self._is_claiming else self._next_group(max_jobs, ended)
        if not ended and group is None:
            return
        if self._dequeue_strategy == DequeueStrategy.RANDOM:
            random.shuffle(self._ordered_queues)
        exchange = Exchange(
            ended,
            current=next((job for job in self.in_flight.values() if not job.is_over), None),
            idle_state=WorkerStatus.SUSPENDED if self._is_suspended else WorkerStatus.IDLE,
            queues=self._ordered_queues if group is None else group.in_order(self._ordered_queues),
            claim=None if group is None else self._claim_of(group, self._num_free(max_jobs, ended, group)),
            group=group,
        )
        self._is_recording = self._is_recording or bool(ended)
        self._is_claiming = self._is_claiming or group is not None
        self._is_starting = self._is_starting and group is None
        link = self.recording_link if ended else self.link
        run = partial(self.exchanger.run, exchange)
        link.call(run, partial(self._take_exchanged, exchange), partial(self._lose_exchange, exchange))

    def _recordable(self) -> list[InFlightJob]:
        """Return the jobs whose ends can be recorded."""
        return [
            inflight for inflight in self.in_flight.values() if inflight.is_decided and not inflight.is_being_stored
        ]

    def _next_group(self, max_jobs: float, ending: Sequence[InFlightJob]) -> QueueGroup | None:
        """Return the group of queues from which to claim, also if only because something is sent anyway."""
        begun = self._find_begun()
        for group in self.queue_groups:
            group.plan.see(
                group.of(self.in_flight.values()),
                [inflight.lease_key for inflight in group.of(begun)],
                self.excluded_owners(group),
            )
        if not self._may_claim:
            return None
        for group in self.queue_groups:
            group.num_wanted = max(0, int(min(self.num_wanted(group), self._num_free(max_jobs, ending, group))))
        due = self.queue_groups.take_turn(lambda group: group.plan.is_due(group.num_wanted))
        return self.queue_groups.take_turn(lambda _: True) if due is None and ending else due

    def _find_begun(self) -> list[InFlightJob]:
        """Return the jobs that have begun since the last look, which goes through all rows of those that wait."""
        if clock_s() < self._look_at:
            return []
        self._look_at = clock_s() + self._look_s
        return [inflight for inflight in self.in_flight.values() if inflight.begins()]

    @property
    def _look_s(self) -> float:
        return min(group.plan.look_s for group in self.queue_groups)

    def _num_free(self, max_jobs: float, ending: Sequence[InFlightJob], group: QueueGroup) -> float:
        """Return how many more jobs the worker may have, and of these queues no more than their share of all."""
        num_free = min(self.capacity + len(ending) - len(self.in_flight), max_jobs - self._num_claimed)
        share = max(1, self.capacity // len(self.queue_groups))
        return min(num_free, share + len(group.of(ending)) - len(group.of(self.in_flight.values())))

    def _claim_of(self, group: QueueGroup, num_free: float) -> Claim:
        """Return the next claim from a group of queues."""
        running = [inflight for inflight in self.in_flight.values() if not inflight.is_over]
        num_in_group = len(group.of(running))
        wanted = Claim(
            max_jobs=group.num_wanted,
            num_in_flight=num_in_group,
            num_elsewhere=len(running) - num_in_group,
            max_in_flight=min([self.capacity, *(job.job.max_concurrency or self.capacity for job in running)]),
            list_length=self.capacity,
            round_robin=self._dequeue_strategy == DequeueStrategy.ROUND_ROBIN,
            max_taken_over=self.capacity if self.takes_over else 0,
        )
        known = [inflight.lease_key for inflight in group.of(self.in_flight.values())]
        return group.plan.claim(wanted, known=known, num_free=num_free)

    @property
    def _may_claim(self) -> bool:
        return not self._stop_requested and not self._must_release and self.result_writer.has_room

    def _end_exchange(self, exchange: Exchange) -> None:
        self._is_recording = self._is_recording and not exchange.ended
        self._is_claiming = self._is_claiming and exchange.claim is None

    def _take_exchanged(self, exchange: Exchange, exchanged: Exchanged) -> None:
        self._end_exchange(exchange)
        self._backoff_s = 0.1
        self._outage.ended("Redis is back")
        for inflight in exchanged.recorded:
            self.in_flight.pop(inflight.lease_key, None)
            self._recorded_leases.append(inflight.lease_key)
            self._plan_of(inflight).end(inflight)
            level = logging.WARNING if isinstance(inflight.error, JobError) else logging.INFO
            if self.tracer is not None:
                trace_job(self.tracer, inflight)
            self.log.log(level, "ends: %s", inflight.end, extra={"job": inflight.job.id})
            if inflight.error is None and inflight.job.on_recorded is not None:
                inflight.job.on_recorded()
        for inflight in exchanged.lost:
            self.in_flight.pop(inflight.lease_key, None)
            self.log.warning("its lease was lost, so its end is not recorded here", extra={"job": inflight.job.id})
        for inflight in exchange.ended:  # what is left waits for the link, and nobody needs to run it again
            if inflight.lease_key in self.in_flight and not inflight.has_begun:
                inflight.has_begun = True
                self._plan_of(inflight).report(inflight.lease_key)
        if exchanged.claimed is not None and exchange.group is not None:
            exchange.group.plan.take(exchanged.claimed, exchanged.elapsed_s)
            self._take_claimed(exchanged.claimed)
        if exchanged.may_have_enqueued:
            self._wake_up()

    def _plan_of(self, inflight: InFlightJob) -> ClaimPlan:
        return self.queue_groups.of_queue(inflight.queue.name).plan

    def _take_claimed(self, claimed: Claimed) -> None:
        self._set_suspended(claimed.is_suspended)
        if not claimed.jobs:
            return
        if self._dequeue_strategy == DequeueStrategy.ROUND_ROBIN:
            self.reorder_queues(claimed.jobs[-1].queue)
        self._admit(claimed.jobs)

    def _lose_exchange(self, exchange: Exchange, error: Exception) -> None:
        self._end_exchange(exchange)
        self._lose_messages()
        self._lose_redis(error)
        self._put_back([inflight for inflight in self.exchanger.stuck if inflight.lease_key in self.in_flight])

    def _lose_redis(self, error: Exception) -> None:
        """Wait before the next attempt. Jobs in flight go on, and their ends are kept until Redis takes them.

        Other workers lost Redis as well, so no jobs are reclaimed before all have had time to extend their leases.
        """
        if not (isinstance(error, REDIS_UNAVAILABLE) or (isinstance(error, RedisError) and is_wrong_type(error))):
            raise error
        self._outage.failed(
            "Redis is away (%s); %d jobs are kept, trying again until it is back",
            *(error, len(self.in_flight)),
            level=logging.ERROR,
        )
        self._reclaim_at = clock_s() + self.settings.lease_s
        self._try_again_at = clock_s() + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, 2.0)

    def _start_reclaim(self) -> None:
        self._reclaim_at = math.inf  # until this one has ended
        self.link.call(self._reclaim, self._take_reclaimed, self._lose_redis)

    def _reclaim(self) -> Reclaimed:
        """Take jobs back from dead workers of this machine, and from silent ones. Runs on the link."""
        reclaimed = Reclaimed()
        held = leases_of_dead(
            self.connection, self.queues, self.name, self.settings.lease_s, is_starting=self._is_starting
        )
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
            self._wake_up()
        self._admit(reclaimed.to_end)

    def _set_suspended(self, is_suspended: bool) -> None:
        if is_suspended != self._is_suspended:
            self._is_suspended = is_suspended
            self.log.info("%s", "suspended, until `rq resume` or `POST /resume`" if is_suspended else "resumed")
            awake = WorkerStatus.BUSY if self.in_flight else WorkerStatus.IDLE
            state = WorkerStatus.SUSPENDED if is_suspended else awake
            self.link.call(partial(self.set_state, state), lambda _: None, self._lose_redis)

    # Messages, and changes of leases that heartbeats find.

    def _wake_up(self) -> None:
        for group in self.queue_groups:
            group.plan.wake()

    def _take_leased(self, claimed: ClaimedJob) -> None:
        self._admit([claimed])

    def _lose_messages(self) -> None:
        for group in self.queue_groups:
            begun = [inflight.lease_key for inflight in group.of(self.in_flight.values()) if inflight.has_begun]
            group.plan.reconcile(begun)

    def _yield_job(self, lease_key: str) -> None:
        """Drop a job that an idle worker has taken: see docs/architecture.md, how workers share a queue."""
        if inflight := self.in_flight.pop(lease_key, None):
            self.log.info("goes to another worker, which was idle", extra={"job": inflight.job.id})
            inflight.abandon()

    def _apply_lease_changes(self, lost: set[str], canceled: set[str]) -> None:
        """Drop jobs whose lease was lost; stop jobs that their owner canceled."""
        for lease_key in lost:
            if inflight := self.in_flight.pop(lease_key, None):
                self.log.warning(
                    "its lease is lost, so it stops here: another worker has it, or it was deleted",
                    extra={"job": inflight.job.id},
                )
                inflight.abandon()
        for lease_key in canceled & self.in_flight.keys():
            self.in_flight[lease_key].fail(Stopped())

    # Giving jobs back.

    def stop_claiming(self, reason: str) -> None:
        """Claim no more jobs until the process is restarted, and put those in flight back. Any thread may call it.

        The process stays alive, so that it can be seen with its reason.
        """
        self._stopped_because = reason
        self._post_call(self._show_stop)

    def _show_stop(self) -> None:
        self.log.error("claims no more jobs until it is restarted: %s", self._stopped_because)
        self.link.call(partial(self._write_stop, list(self.in_flight)), lambda _: None, self._lose_redis)

    def _write_stop(self, known: Sequence[str]) -> None:
        self.leases.leave(self.queues, known)
        self.set_state(WorkerStatus.SUSPENDED)
        with self.connection.pipeline() as pipeline:
            self.register(pipeline)
            pipeline.execute()

    @property
    def _must_release(self) -> bool:
        is_ending = self._drain_deadline is not None and clock_s() >= self._release_at
        return is_ending or self._stopped_because is not None or self._is_going_to_sleep

    def _release(self) -> None:
        """Put everything that is not over back on the queues, with all its retries."""
        self._put_back([inflight for inflight in self.in_flight.values() if not inflight.is_over])

    def _put_back(self, jobs: Sequence[InFlightJob]) -> None:
        if not jobs:
            return
        for inflight in jobs:
            del self.in_flight[inflight.lease_key]
            inflight.abandon()
        self.log.warning("%d jobs in flight put back", len(jobs))
        self.link.call(partial(self.leases.release, jobs), lambda _: None, self._lose_redis)

    def _report_death(self) -> None:
        """Let others know that the jobs that were running may have ended this process: see store/lua/reclaim.lua."""
        held = [lease_key for lease_key, inflight in list(self.in_flight.items()) if not inflight.is_over]
        if not held:
            return
        report = partial(self.leases.reclaim, self.queues, self.settings.crash_limit, held)
        self.link.call(report, lambda _: None, lambda _: None)
        self.link.wait(2.0)

    # Sleep. The hook calls these two on its own thread.

    def hand_back_for_sleep(self) -> None:
        """Put jobs back and claim none. Return when Redis knows it, or after SLEEP_TIMEOUT_S."""
        is_done = Event()

        def hand_back() -> None:
            self._is_going_to_sleep = True
            self.log.info("the Mac goes to sleep")
            self._release()
            self.link.call(
                partial(self.leases.leave, self.queues, list(self.in_flight)), lambda _: is_done.set(), self._lose_redis
            )

        self._post_call(hand_back)
        is_done.wait(SLEEP_TIMEOUT_S)

    def resume_after_sleep(self) -> None:
        """Claim jobs again."""

        def resume() -> None:
            self._is_going_to_sleep = False
            self.log.info("the Mac is awake")
            self._lose_messages()

        self._post_call(resume)

    # On the thread of the periodic tasks.

    def _send_heartbeat(self) -> None:
        """Show that the worker lives, and extend its leases.

        `list` of a dict's values is atomic, so it needs no lock.
        """
        in_flight = list(self.in_flight.values())
        started_at = awake_s()
        self.leases.length.begin(started_at)
        lost, canceled = self.leases.extend(in_flight)
        if in_flight:
            self.exchanger.link_speed.record_round_trip(awake_s() - started_at)
        if lost or canceled:
            self._post_call(partial(self._apply_lease_changes, lost, canceled))
        with self.connection.pipeline() as pipeline:
            self.heartbeat(math.ceil(self.leases.length.seconds * 3), pipeline=pipeline)
            self.register(pipeline)
            self.wrong_types.report(drop_wrong_types(self.connection, pipeline))
            pipeline.execute()
        self.heartbeat_clock.record()
        self.leases.length.end(awake_s())
