"""Decide when a worker claims, and how many jobs. Sends no command to Redis.

A worker should always have work and hoard none, because another may be idle or faster. So it keeps what it needs until
the next but one reply of Redis, and for one more step of the engine, by its own measured speed; and Redis gives it no
more than its share, by the measured speeds of all, of what waits and is in flight (store/lua/speeds.lua).
"""

import math
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Protocol

from scorepool.store import LIST_LENGTH
from scorepool.store.clock import awake_s, clock_s
from scorepool.worker.claims.leases import MAX_STARTABLE, Claim, Claimed
from scorepool.worker.claims.speed import Speed

POLL_S = 1.0  # between claims when no message wakes the worker
REFUSED_S = 0.5  # until a worker that is idle takes a job that was left to faster ones
LOOK_S = 0.02  # between looks whether claimed jobs have begun, at least
LOOK_SHARE = 0.02  # of a step of the engine, between two such looks: each stops a CPU's products for a moment
RECONCILE_S = 5.0  # between questions for leases that it does not know, while it has jobs; POLL_S while it has none
OTHERS_S = 0.25  # between looks for jobs of other owners, while jobs that have not begun fill the worker
TAKE_OVER_S = 0.25  # between looks at what others have not begun, while it has no jobs; POLL_S while it has some
EXCLUDED_S = 0.1  # between claims while some owners' jobs are not claimed: no message tells of those of the others
REPORT_S = 0.1  # at least, between exchanges that only report which jobs have begun
AHEAD_S = 0.15  # seconds of work that wait in the worker beyond what the exchanges with Redis need
STEPS_AHEAD = 1.5  # steps of the engine for which jobs wait too: more than one, so that a step that is not full grows
MAX_STEP_S = 20.0  # a step that takes longer may never end, and the jobs that wait for it are those of others
# After running out of jobs: the worker measures only the speed at which it got some.
MAX_GAIN = 4.0  # of what is kept ahead
GAIN_UP, GAIN_DOWN = 1.4, 0.97  # at each claim
UNREADY_SPEED = 1e-6  # so that its share is nothing, unless no other worker is ready
UNSENT_S = 2.0  # seconds of ended jobs that wait to be recorded, above which the network is what limits the worker
FIRST_JOBS = 4  # that a worker may have at first
DOUBLING_S = 0.1  # until a worker that has not ended a job yet may have twice as many


class HeldJob(Protocol):
    """A job in flight: an InFlightJob."""

    is_over: bool
    has_begun: bool

    @property
    def owner(self) -> str: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def work(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker has in flight."""

    num_jobs: int = 0  # that are not over
    num_unbegun: int = 0  # without those of excluded owners, as in num_rows
    unbegun_owners: frozenset[str] = frozenset()  # whose jobs have not begun
    num_rows: int = 0  # of the jobs that are not over
    num_ended: int = 0  # that have yet to be recorded


class ClaimPlan:
    """What one worker has and will claim. Used by its main thread."""

    def __init__(self) -> None:
        self.speed = Speed()
        self.load = Load()
        self.queues_are_empty = False  # the last claim found no more, and nobody has woken the worker since
        self.round_trip_s = 0.0  # of an exchange, smoothed
        self.step_s = 0.0  # of the engine's longest lately: the jobs of the next one have to be there when it begins
        self.is_ready = True  # False: jobs of these queues would have to wait for weights to be loaded
        self._is_refused = False  # the last claim found jobs and got none
        self._is_behind = False  # too many ended jobs wait to be recorded
        self._must_reconcile = False
        self._excluded: AbstractSet[str] = frozenset()  # owners whose jobs are not claimed
        self._unreported: list[str] = []  # keys of leases whose jobs have begun
        self._rows_per_job = 1.0  # smoothed
        self._gain = 1.0  # of what is kept ahead
        self._max_jobs = 0  # of the last claim
        self._num_startable: float = math.inf  # jobs that would begin at once, as of the last `num_wanted`
        self._sent_at = -math.inf  # clock_s() of the last exchange, like those below
        self._is_woken = True
        self._speed_written_at = -math.inf
        self._reconciled_at = -math.inf
        self._looked_at = -math.inf  # at what others have not begun
        self._looked_for_others_at = -math.inf  # for jobs of other owners

    def see(
        self, in_flight: Collection[HeldJob], begun: Iterable[str], excluded: AbstractSet[str] = frozenset()
    ) -> None:
        """Look at the jobs in flight, of which some have begun since the last call.

        `excluded` are owners whose jobs wait for something else than the engine. The engine has room for those of the
        others as if these were not there.
        """
        self._unreported += begun
        self._excluded = excluded
        running = [inflight for inflight in in_flight if not inflight.is_over]
        counted = [inflight for inflight in running if inflight.has_begun or inflight.owner not in excluded]
        unbegun = [inflight.owner for inflight in counted if not inflight.has_begun]
        self.load = Load(
            num_jobs=len(running),
            num_unbegun=len(unbegun),
            unbegun_owners=frozenset(unbegun),
            num_rows=sum(inflight.num_rows for inflight in counted),
            num_ended=len(in_flight) - len(running),
        )
        self.speed.advance(awake_s(), bool(in_flight))

    def set_ready(self, is_ready: bool) -> None:
        """Say whether jobs can begin at once. If not, workers whose jobs can are to have them: see `claim`."""
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            self._speed_written_at = -math.inf

    def end(self, inflight: HeldJob) -> None:
        """Count a job whose end is recorded."""
        self.speed.advance(awake_s(), is_busy=True)
        self.speed.end(inflight.work)
        self._rows_per_job = 0.9 * self._rows_per_job + 0.1 * inflight.num_rows

    @property
    def num_ahead(self) -> int:
        """How many jobs that have not begun the worker keeps, to fill a step and to have work until Redis answers."""
        seconds = self._gain * (2 * self.round_trip_s + AHEAD_S) + STEPS_AHEAD * min(self.step_s, MAX_STEP_S)
        return max(1, math.ceil((self.speed.jobs_per_s or 0.0) * seconds))

    @property
    def look_s(self) -> float:
        """The seconds between two looks whether claimed jobs have begun, which they do when a step begins."""
        return max(LOOK_S, LOOK_SHARE * min(self.step_s, MAX_STEP_S))

    def report(self, lease_key: str) -> None:
        """Report with the next claim that this job has begun."""
        self._unreported.append(lease_key)

    def num_wanted(self, max_rows: int) -> int:
        """Return how many more jobs a worker should have that runs at most `max_rows` rows at once.

        Rows are filled only while all jobs have begun: else something other than rows is what the engine lacks. A
        worker without a measure begins with a few jobs and doubles.
        """
        load, jobs_per_s = self.load, self.speed.jobs_per_s
        self._is_behind = load.num_ended > max(4, (jobs_per_s or max_rows / UNSENT_S) * UNSENT_S)
        if self._is_behind:
            return 0
        self._num_startable = 0
        if not load.num_unbegun:
            self._num_startable = math.ceil(max(0, max_rows - load.num_rows) / max(1.0, self._rows_per_job))
        wanted = self.num_ahead - load.num_unbegun + self._num_startable
        if jobs_per_s is None:
            num_allowed: int = FIRST_JOBS << min(16, int(self.speed.busy_s / DOUBLING_S))
            wanted = min(wanted, num_allowed - load.num_jobs)
        return max(0, wanted)

    def is_due(self, num_wanted: int) -> bool:
        """True if an exchange is due, also without the end of a job."""
        return self.due_in_s(num_wanted) <= 0

    def due_in_s(self, num_wanted: int) -> float:
        """Return the seconds until the next exchange or look, if no job ends before."""
        if self._is_woken or (num_wanted > 0 and not self.queues_are_empty and not self._is_refused):
            return 0.0
        is_crowded = self._is_crowded and not num_wanted
        after_s = (
            REPORT_S if self._unreported else REFUSED_S if self._is_refused else OTHERS_S if is_crowded else POLL_S
        )
        after_s = min(after_s, EXCLUDED_S) if self._excluded and num_wanted > 0 else after_s
        return self._sent_at + after_s - clock_s()

    @property
    def _is_crowded(self) -> bool:
        """True if no job is wanted because some have not begun.

        Jobs of other owners are, because the engine lets owners take turns.
        """
        return bool(self.load.unbegun_owners) and not self._is_behind

    def claim(self, wanted: Claim, known: Iterable[str], num_free: float = math.inf) -> Claim:
        """Return the next claim: `wanted`, with what this plan adds.

        `known` are the keys of all leases, `num_free` is how many more jobs the worker may have at all.
        """
        now_s = clock_s()
        has_run_out = not self.load.num_unbegun and not self.queues_are_empty
        self._gain = min(MAX_GAIN, self._gain * GAIN_UP) if has_run_out else max(1.0, self._gain * GAIN_DOWN)
        exceeds_share = self._is_refused and not self.load.num_jobs and now_s >= self._sent_at + REFUSED_S
        writes_speed = now_s >= self._speed_written_at + POLL_S
        is_idle = not self.load.num_jobs
        reconciles = self._must_reconcile or now_s >= self._reconciled_at + (POLL_S if is_idle else RECONCILE_S)
        has_room = wanted.max_jobs > 0
        num_to_take = min(wanted.max_taken_over, wanted.max_jobs, self._num_startable)
        looks = num_to_take > 0 and now_s >= self._looked_at + (TAKE_OVER_S if is_idle else POLL_S)
        looks_for_others = (
            self._is_crowded and not has_room and num_free >= 1 and now_s >= self._looked_for_others_at + OTHERS_S
        )
        claim = replace(
            wanted,
            max_jobs=1 if looks_for_others else min(1, wanted.max_jobs) if exceeds_share else wanted.max_jobs,
            excluded=sorted(self._excluded | self.load.unbegun_owners if looks_for_others else self._excluded),
            list_length=min(wanted.list_length, LIST_LENGTH),
            exceeds_share=exceeds_share or looks_for_others,
            waits=has_room,
            num_startable=int(min(self._num_startable, MAX_STARTABLE)),
            max_taken_over=int(num_to_take) if looks else 0,
            speed=self.speed.work_per_s if self.is_ready else UNREADY_SPEED,
            writes_speed=writes_speed,
            begun=self._unreported,
            known=list(known) if reconciles else None,
        )
        if reconciles:
            self._reconciled_at = now_s
        if looks:
            self._looked_at = now_s
        if looks_for_others or has_room:
            self._looked_for_others_at = now_s
        if writes_speed:
            self._speed_written_at = now_s
        self._unreported, self._must_reconcile, self._is_woken = [], False, False
        self._max_jobs, self._sent_at = wanted.max_jobs and claim.max_jobs, now_s
        return claim

    def take(self, claimed: Claimed, elapsed_s: float) -> None:
        """Look at the reply to the last claim, and at how long it took."""
        self.round_trip_s = 0.8 * self.round_trip_s + 0.2 * elapsed_s if self.round_trip_s else elapsed_s
        has_less = len(claimed.jobs) < self._max_jobs
        self.queues_are_empty = claimed.num_waiting == 0 and (has_less or not self._max_jobs)
        self._is_refused = claimed.num_waiting > 0 and not claimed.jobs and self._max_jobs > 0

    def wake(self) -> None:
        """Claim at once: there may be jobs."""
        self._is_woken, self.queues_are_empty = True, False

    def reconcile(self, lease_keys: Iterable[str] = ()) -> None:
        """Ask with the next claim for leases that this worker does not know, because a reply or message was lost.

        `lease_keys` are those whose jobs have begun: that report was lost too.
        """
        self.wake()
        self._must_reconcile = True
        self._unreported = list(lease_keys)
        self._speed_written_at = -math.inf
