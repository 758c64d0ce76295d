"""Simulate a fleet around one Redis by discrete events.

Redis is a server that handles one message after the other, each in its measured CPU time; a message and its reply take
half a round trip. Workers follow worker/claims/claim_plan.py: they claim what fills their rows and what they end until
Redis answers, take no more than their share of a queue that is not deep, record ends and claim in one exchange, report
what has begun, and otherwise ask once a second. Waiting workers get submitted jobs with the message that wakes them.

Left out: bytes on the wire, owners and priorities, leases that grow as Redis slows down, and the CPU of hosts.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from bench.fleet_simulation.costs import Costs
from scorepool.worker.claims.claim_plan import AHEAD_S, POLL_S, REFUSED_S, REPORT_S, TAKE_OVER_S
from scorepool.worker.claims.lease_length import BEATS_PER_LEASE

WARM_UP = 0.4  # of the time
MANY_STEPS = 10  # of a job, beside which the wait for the step that is under way takes no room from others
MAX_SEEN, UNBEGUN_S, MAX_HANDED_OUT = 500, 0.5, 4  # as in store/lua/claim.lua
RECLAIMS_PER_LEASE = 4
DEEP = 16  # a queue of so many jobs for each that a worker could have is deep


class Workload(msgspec.Struct, kw_only=True, frozen=True):
    """What the jobs are, and what a worker is."""

    name: str
    rows: int  # of a worker
    step_s: float
    num_steps: int  # of a job
    streams: bool = False

    @property
    def job_s(self) -> float:
        return self.step_s * self.num_steps

    @property
    def jobs_per_s(self) -> float:
        """What a worker ends, with all its rows filled."""
        return self.rows / self.job_s


class Fleet(msgspec.Struct, kw_only=True, frozen=True):
    """What is simulated."""

    num_workers: int
    workload: Workload
    load: float  # submitted, of what the workers can do together
    rtt_s: float
    seconds: float
    lease_s: float = 20.0
    silent_per_hour: float = 0.0  # how often a worker vanishes without a word, jobs and all
    silent_s: float = 120.0  # for so long
    max_jobs_per_s: float = math.inf  # submitted at most


class Measured(msgspec.Struct, kw_only=True):
    """What came of it."""

    offered_per_s: float
    ended_per_s: float
    redis_busy: float  # share of one core
    wait_p50_s: float  # from a submission to the job's first step
    wait_p99_s: float
    total_p50_s: float  # from a submission to the recorded end
    total_p99_s: float


@dataclass(eq=False, slots=True)
class SimulatedJob:
    submitted_at: float
    begun_at: float = math.nan
    is_taken: bool = False  # by another worker than that which claimed it


@dataclass(eq=False, slots=True)
class SimulatedWorker:
    rank: int  # by speed, which differs by chance
    running: set[SimulatedJob] = field(default_factory=set)
    unbegun: deque[SimulatedJob] = field(default_factory=deque)
    ended: list[SimulatedJob] = field(default_factory=list)
    being_recorded: int = 0
    offers: int = 0  # jobs that Redis may hand out to it
    is_listed: bool = False  # among those that wait
    is_exchanging: bool = False
    is_writing_tokens: bool = False
    has_unreported: bool = False
    is_refused: bool = False
    is_away: bool = False
    sent_at: float = -math.inf
    looked_at: float = -math.inf  # at what others have not begun
    due_at: float = -math.inf  # of the event that looks whether an exchange is due
    beat_at: float = 0.0

    @property
    def num_leases(self) -> int:
        return len(self.running) + len(self.unbegun) + len(self.ended) + self.being_recorded


class Simulation:
    """One run."""

    def __init__(self, fleet: Fleet, costs: Costs, seed: int = 1) -> None:
        self.fleet, self.costs = fleet, costs
        self._random = random.Random(seed)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._workers = [SimulatedWorker(rank) for rank in range(fleet.num_workers)]
        self._waiting: list[tuple[int, SimulatedWorker]] = []  # heap: those that Redis may hand a job to
        self._queue: deque[SimulatedJob] = deque()
        self._unbegun: dict[SimulatedJob, tuple[SimulatedWorker, float]] = {}  # who has it, and since when
        self._num_leased = 0
        self._messages: deque[Callable[[], None]] = deque()  # that wait for Redis
        self._is_handling = False
        self._redis_free_at = 0.0
        self._redis_busy_s = 0.0
        self._ends: list[tuple[SimulatedJob, float]] = []
        speed = fleet.workload.jobs_per_s
        self._num_ahead = max(1, math.ceil(speed * (2 * fleet.rtt_s + AHEAD_S)))

    def run(self) -> Measured:
        """Run to the end; the first WARM_UP of the time does not count."""
        fleet = self.fleet
        offered = min(fleet.max_jobs_per_s, fleet.load * fleet.num_workers * fleet.workload.jobs_per_s)
        self._arrive(offered)
        for worker in self._workers:
            self._at(self._random.uniform(0, POLL_S), lambda worker=worker: self._look(worker))  # type: ignore[misc]
            beat_s = fleet.lease_s / BEATS_PER_LEASE
            self._at(self._random.uniform(0, beat_s), lambda worker=worker: self._beat(worker))  # type: ignore[misc]
            every_s = fleet.lease_s / RECLAIMS_PER_LEASE
            self._at(self._random.uniform(0, every_s), lambda worker=worker: self._reclaim(worker))  # type: ignore[misc]
            if fleet.silent_per_hour:
                self._plan_silence(worker)
        begin_s, busy_before = fleet.seconds * WARM_UP, 0.0
        self._at(begin_s, lambda: None)
        while self._events and self._events[0][0] <= fleet.seconds:
            at, _, call = heapq.heappop(self._events)
            if self._now < begin_s <= at:
                busy_before = self._redis_busy_s
            self._now = at
            call()
        return self._measured(offered, begin_s, busy_before)

    def _measured(self, offered: float, begin_s: float, busy_before: float) -> Measured:
        window_s = self.fleet.seconds - begin_s
        counted = [(job, at) for job, at in self._ends if at >= begin_s]
        waits = sorted(job.begun_at - job.submitted_at for job, _ in counted) or [math.inf]
        totals = sorted(at - job.submitted_at for job, at in counted) or [math.inf]
        return Measured(
            offered_per_s=offered,
            ended_per_s=len(counted) / window_s,
            redis_busy=min(1.0, self.costs.base + (self._redis_busy_s - busy_before) / window_s),
            wait_p50_s=quantile(waits, 0.5),
            wait_p99_s=quantile(waits, 0.99),
            total_p50_s=quantile(totals, 0.5),
            total_p99_s=quantile(totals, 0.99),
        )

    def _at(self, at: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), call))

    def _send(self, cost: Callable[[], float], effect: Callable[[], None], on_reply: Callable[[], None]) -> None:
        """Send Redis a message, which has its effect when Redis has come to it."""

        def handle() -> None:
            seconds = cost()
            self._redis_busy_s += seconds
            self._redis_free_at = self._now + seconds
            effect()
            self._at(self._redis_free_at + self.fleet.rtt_s / 2, on_reply)
            self._at(self._redis_free_at, self._handle_next)

        def arrive() -> None:
            self._messages.append(handle)
            if not self._is_handling:
                self._handle_next()

        self._at(self._now + self.fleet.rtt_s / 2, arrive)

    def _handle_next(self) -> None:
        """Let Redis come to the message that waits longest."""
        self._is_handling = bool(self._messages)
        if self._messages:
            self._messages.popleft()()

    # Clients.

    def _arrive(self, per_s: float) -> None:
        if per_s <= 0:
            return
        job = SimulatedJob(self._now)
        self._send(lambda: self.costs.submit, lambda: self._enqueue(job), lambda: None)
        self._at(self._now + self._random.expovariate(per_s), lambda: self._arrive(per_s))

    def _enqueue(self, job: SimulatedJob) -> None:
        while self._waiting and not self._queue:
            _, worker = self._waiting[0]  # the fastest
            if worker.offers and not worker.is_away:
                worker.offers -= 1
                self._num_leased += 1
                self._at(self._redis_free_at + self.fleet.rtt_s / 2, partial(self._take, worker, [job]))
                return
            heapq.heappop(self._waiting)
            worker.is_listed = False
        self._queue.append(job)

    def _offer(self, worker: SimulatedWorker, count: int) -> None:
        """Let Redis hand out so many jobs to a worker."""
        worker.offers = max(0, count)
        if worker.offers and not worker.is_listed:
            worker.is_listed = True
            heapq.heappush(self._waiting, (worker.rank, worker))

    # A worker.

    def _take(self, worker: SimulatedWorker, jobs: list[SimulatedJob]) -> None:
        if worker.is_away:
            self._queue.extendleft(jobs)  # its lease brings it back; a moment earlier here
            self._num_leased -= len(jobs)
            return
        worker.unbegun += jobs
        self._unbegun |= dict.fromkeys(jobs, (worker, self._now))
        self._begin(worker)
        self._look(worker)

    def _begin(self, worker: SimulatedWorker) -> None:
        while worker.unbegun and len(worker.running) < self.fleet.workload.rows:
            job = worker.unbegun.popleft()
            self._unbegun.pop(job, None)
            joins_others = worker.running and self.fleet.workload.num_steps >= MANY_STEPS
            until_step_s = self._random.uniform(0, self.fleet.workload.step_s) if joins_others else 0.0
            job.begun_at = self._now + until_step_s
            worker.running.add(job)
            worker.has_unreported = True
            ends_at = job.begun_at + self.fleet.workload.job_s
            self._at(ends_at, lambda job=job, ends_at=ends_at: self._end(worker, job, ends_at))  # type: ignore[misc]
            if self.fleet.workload.streams and not worker.is_writing_tokens:
                worker.is_writing_tokens = True
                self._write_tokens(worker)

    def _end(self, worker: SimulatedWorker, job: SimulatedJob, ends_at: float) -> None:
        if job not in worker.running or job.begun_at + self.fleet.workload.job_s != ends_at:
            return  # its worker was silent meanwhile
        worker.running.discard(job)
        worker.ended.append(job)
        self._begin(worker)
        self._look(worker)

    def _num_wanted(self, worker: SimulatedWorker) -> int:
        wanted = self._num_ahead - len(worker.unbegun)
        if not worker.unbegun:
            wanted += self.fleet.workload.rows - len(worker.running)
        return max(0, wanted)

    def _look(self, worker: SimulatedWorker) -> None:
        """Exchange if it is due; else look again when it may be."""
        if worker.is_exchanging or worker.is_away:
            return
        after_s = REFUSED_S if worker.is_refused else REPORT_S if worker.has_unreported else POLL_S
        due_at = worker.sent_at + after_s
        wants = self._num_wanted(worker) > 0 and not worker.is_refused and worker.offers <= 0 and bool(self._queue)
        if worker.ended or wants or due_at <= self._now:
            self._exchange(worker)
        elif worker.due_at != due_at:
            worker.due_at = due_at
            self._at(due_at, lambda: self._look(worker))

    def _exchange(self, worker: SimulatedWorker) -> None:
        """Record ended jobs and claim others, in one round trip."""
        worker.is_exchanging, worker.sent_at, worker.has_unreported = True, self._now, False
        ended, worker.ended = worker.ended, []
        worker.being_recorded = len(ended)
        exceeds_share = worker.is_refused and not worker.running
        looks = self._looks(worker)
        claimed: list[SimulatedJob] = []
        costs = self.costs

        def cost() -> float:
            seconds = costs.claim + (costs.finish + costs.finish_job * len(ended) if ended else 0.0)
            seconds += len(ended) * costs.read  # by the client that waited
            wanted = self._num_wanted(worker)
            is_shallow = len(self._queue) < DEEP * len(self._workers) * max(1, wanted + worker.num_leases)
            if self._queue and wanted and is_shallow:
                seconds += costs.share_worker * len(self._workers)
            elif looks and not self._queue and self._num_leased > worker.num_leases:
                seconds += costs.take_over_lease * min(MAX_SEEN, self._num_leased)
            return seconds + costs.claim_job * self._share(worker, wanted, exceeds_share)

        def effect() -> None:
            recorded_at = self._now
            self._ends += [(job, recorded_at) for job in ended]
            self._num_leased -= len(ended)
            wanted = self._num_wanted(worker)
            for _ in range(self._share(worker, wanted, exceeds_share)):
                claimed.append(self._queue.popleft())
            self._num_leased += len(claimed)
            if looks and not claimed and not self._queue:
                claimed.extend(self._take_over(worker, self._num_free_rows(worker)))
            worker.is_refused = bool(self._queue) and not claimed and wanted > 0
            self._offer(worker, 0 if self._queue else min(MAX_HANDED_OUT, wanted - len(claimed)))

        def on_reply() -> None:
            worker.is_exchanging, worker.being_recorded = False, 0
            self._take(worker, claimed)

        self._send(cost, effect, on_reply)

    def _looks(self, worker: SimulatedWorker) -> bool:
        """True if a claim looks at what others have not begun."""
        is_idle = not worker.running and not worker.unbegun
        if not self._num_free_rows(worker) or self._now < worker.looked_at + (TAKE_OVER_S if is_idle else POLL_S):
            return False
        worker.looked_at = self._now
        return True

    def _num_free_rows(self, worker: SimulatedWorker) -> int:
        return max(0, self.fleet.workload.rows - len(worker.running) - len(worker.unbegun))

    def _take_over(self, worker: SimulatedWorker, wanted: int) -> list[SimulatedJob]:
        """Take jobs that other workers have not begun, the last ones first."""
        found: list[SimulatedJob] = []
        for job, (holder, since) in itertools.islice(reversed(self._unbegun.items()), MAX_SEEN):
            if len(found) < wanted and holder is not worker and since <= self._now - UNBEGUN_S and not job.is_taken:
                found.append(job)
        for job in found:
            holder, _ = self._unbegun.pop(job)
            holder.unbegun.remove(job)
            job.is_taken = True  # once
        return found

    def _share(self, worker: SimulatedWorker, wanted: int, exceeds_share: bool) -> int:
        """Return how many jobs a claim leases."""
        if exceeds_share:
            return min(1, wanted, len(self._queue))
        share = math.ceil((len(self._queue) + self._num_leased) / len(self._workers))
        in_flight = len(worker.running) + len(worker.unbegun)
        return max(0, min(wanted, len(self._queue), share - in_flight))

    def _write_tokens(self, worker: SimulatedWorker) -> None:
        """Write the tokens of each step, or of several while Redis is slow."""
        if not worker.running or worker.is_away:
            worker.is_writing_tokens = False
            return
        next_at = self._now + self.fleet.workload.step_s
        cost = self.costs.tokens + self.costs.tokens_row * len(worker.running)
        self._send(
            lambda: cost, lambda: None, lambda: self._at(max(next_at, self._now), lambda: self._write_tokens(worker))
        )

    # Beside the jobs.

    def _beat(self, worker: SimulatedWorker) -> None:
        due_at = self._now + self.fleet.lease_s / BEATS_PER_LEASE

        def again() -> None:
            self._at(max(due_at, self._now), lambda: self._beat(worker))

        if worker.is_away:
            again()
            return
        worker.beat_at = self._now
        self._send(lambda: self.costs.beat + self.costs.beat_job * worker.num_leases, lambda: None, again)

    def _reclaim(self, worker: SimulatedWorker) -> None:
        due_at = self._now + self.fleet.lease_s / RECLAIMS_PER_LEASE

        def again() -> None:
            self._at(max(due_at, self._now), lambda: self._reclaim(worker))

        if worker.is_away:
            again()
            return
        self._send(lambda: self.costs.reclaim + self.costs.reclaim_lease * self._num_leased, lambda: None, again)

    def _plan_silence(self, worker: SimulatedWorker) -> None:
        self._at(self._now + self._random.expovariate(self.fleet.silent_per_hour / 3600), lambda: self._vanish(worker))

    def _vanish(self, worker: SimulatedWorker) -> None:
        """Let a worker vanish with its jobs, which others get when its leases end."""
        lost = [*worker.running, *worker.unbegun, *worker.ended]
        for job in lost:
            self._unbegun.pop(job, None)
        worker.running, worker.unbegun, worker.ended = set(), deque(), []
        worker.is_away, worker.has_unreported = True, False
        expiry = max(worker.beat_at, self._now - self.fleet.lease_s / BEATS_PER_LEASE) + self.fleet.lease_s

        def reclaim() -> None:
            self._num_leased -= len(lost)
            self._queue.extendleft(lost)
            for _, other in self._waiting[: len(lost)]:
                self._look(other)

        def come_back() -> None:
            worker.is_away, worker.sent_at = False, -math.inf
            self._look(worker)
            self._plan_silence(worker)

        self._at(max(self._now, expiry), reclaim)
        self._at(self._now + self.fleet.silent_s, come_back)


def quantile(ordered: list[float], share: float) -> float:
    """Return the value below which this share of the ordered values lies."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
