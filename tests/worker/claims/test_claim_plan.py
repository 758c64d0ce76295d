"""A worker that is driven by its ClaimPlan keeps its rows filled and hoards little, on any link and at any speed."""

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count, product
from typing import Any

import pytest

from scorepool.worker.claims import claim_plan
from scorepool.worker.claims.claim_plan import (
    AHEAD_S,
    EXCLUDED_S,
    FIRST_JOBS,
    LOOK_S,
    MAX_STEP_S,
    OTHERS_S,
    POLL_S,
    REFUSED_S,
    STEPS_AHEAD,
    ClaimPlan,
)
from scorepool.worker.claims.leases import Claim, Claimed

CAPACITY = 512


@dataclass(eq=False)
class FakeJob:
    """What a plan sees of an InFlightJob."""

    num_rows: int = 1
    has_begun: bool = False
    is_over: bool = False
    work: float = 1.0
    owner: str = "alice"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(claim_plan, "clock_s", found)
    monkeypatch.setattr(claim_plan, "awake_s", found)
    return found


def jobs(num: int) -> list[Any]:
    """Return jobs for the reply to a claim."""
    return [None] * num


def ask(plan: ClaimPlan, max_jobs: int = 1, known: Iterable[str] = (), **wanted: Any) -> Claim:
    return plan.claim(Claim(max_jobs=max_jobs, num_in_flight=0, max_in_flight=CAPACITY, **wanted), known)


class Simulation:
    """One worker with rows, a job of `job_s` in each, a queue that is never empty, and a link with a round trip."""

    def __init__(self, clock: Clock, max_rows: int, job_s: float, round_trip_s: float, rows_per_job: int = 1) -> None:
        self.clock, self.max_rows, self.job_s, self.round_trip_s = clock, max_rows, job_s, round_trip_s
        self.rows_per_job = rows_per_job
        self.plan = ClaimPlan()
        self.in_flight: list[FakeJob] = []
        self.begun: list[str] = []
        self.most_unbegun = 0
        self.busy_row_s = 0.0
        self.num_claims = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._is_claiming = self._is_recording = False

    def run(self, seconds: float) -> None:
        end_s = self.clock.now_s + seconds
        while self.clock.now_s < end_s:
            self._begin_jobs()
            self._exchange()
            wait_s = LOOK_S if self._is_claiming else max(0.0, min(LOOK_S, self.plan.due_in_s(self._num_wanted)))
            next_s = min(end_s, self.clock.now_s + max(1e-4, wait_s))
            if self._events:
                next_s = max(self.clock.now_s, min(next_s, self._events[0][0]))
            self.busy_row_s += self._num_busy_rows * (next_s - self.clock.now_s)
            self.clock.now_s = next_s
            while self._events and self._events[0][0] <= next_s:
                heapq.heappop(self._events)[2]()

    @property
    def _num_busy_rows(self) -> int:
        return sum(job.num_rows for job in self.in_flight if job.has_begun and not job.is_over)

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock.now_s + seconds, next(self._order), call))

    def _begin_jobs(self) -> None:
        for job in self.in_flight:
            if not job.has_begun and self._num_busy_rows + job.num_rows <= self.max_rows:
                job.has_begun = True
                self.begun.append("begun")
                self._after(self.job_s, lambda job=job: setattr(job, "is_over", True))
        self.most_unbegun = max(self.most_unbegun, sum(not job.has_begun for job in self.in_flight))

    def _exchange(self) -> None:
        ended = [job for job in self.in_flight if job.is_over] if not self._is_recording else []
        self.plan.see(self.in_flight, self.begun)
        self.begun = []
        self._num_wanted = min(self.plan.num_wanted(self.max_rows), CAPACITY + len(ended) - len(self.in_flight))
        if ended:
            self._is_recording = True
            self._after(self.round_trip_s, lambda: self._record(ended))
        if not self._is_claiming and (ended or self.plan.is_due(self._num_wanted)):
            self._is_claiming = True
            self.num_claims += 1
            claim = ask(self.plan, self._num_wanted)
            num = 0 if claim.excluded else claim.max_jobs
            self._after(self.round_trip_s, lambda: self._take(num))

    def _record(self, ended: list[FakeJob]) -> None:
        self._is_recording = False
        for job in ended:
            self.in_flight.remove(job)
            self.plan.end(job)  # type: ignore[arg-type]

    def _take(self, num: int) -> None:
        self._is_claiming = False
        self.plan.take(Claimed(jobs(num), num_waiting=10_000), self.round_trip_s)
        self.in_flight += [FakeJob(self.rows_per_job) for _ in range(num)]


@pytest.mark.parametrize(
    ("max_rows", "job_s", "round_trip_s"),
    [
        *product([32], [0.05], [0.001, 0.02, 0.08, 0.2]),
        *product([32], [0.3, 4.0], [0.001, 0.02, 0.08, 0.2]),
        *product([1, 4], [0.5], [0.001, 0.08, 0.2]),
    ],
)
def test_rows_stay_filled_and_little_is_hoarded(clock: Clock, max_rows: int, job_s: float, round_trip_s: float):
    simulation = Simulation(clock, max_rows, job_s, round_trip_s)
    simulation.run(2.0 + 5 * job_s)  # until the speed is measured
    simulation.busy_row_s, simulation.most_unbegun = 0.0, 0
    simulation.run(10 * job_s + 2.0)

    assert simulation.busy_row_s / (max_rows * (10 * job_s + 2.0)) > 0.95
    jobs_per_s = max_rows / job_s
    assert simulation.most_unbegun <= 2.5 * (jobs_per_s * (2 * round_trip_s + AHEAD_S) + 1) + max_rows


def test_jobs_of_many_rows_fill_the_rows_only_once(clock: Clock):
    simulation = Simulation(clock, max_rows=32, job_s=0.5, round_trip_s=0.02, rows_per_job=8)
    simulation.run(10)
    simulation.most_unbegun = 0
    simulation.run(10)

    assert simulation.most_unbegun <= 8  # four run at once


def test_a_slow_worker_does_not_claim_all_the_time(clock: Clock):
    simulation = Simulation(clock, max_rows=4, job_s=10.0, round_trip_s=0.01)
    simulation.run(5)
    simulation.num_claims = 0
    simulation.run(60)

    assert simulation.num_claims < 60 / OTHERS_S + 60 / 10 * 4 * 3


def test_a_worker_without_a_measure_begins_with_few_jobs_and_doubles(clock: Clock):
    plan = ClaimPlan()
    in_flight: list[Any] = []
    plan.see(in_flight, [])
    assert plan.num_wanted(32) == FIRST_JOBS

    in_flight += [FakeJob(has_begun=True) for _ in range(FIRST_JOBS)]
    plan.see(in_flight, [])
    allowed = []
    for _ in range(5):
        allowed.append(len(in_flight) + plan.num_wanted(32))
        clock.now_s += claim_plan.DOUBLING_S + 1e-6
        plan.see(in_flight, [])
    assert allowed == [4, 8, 16, 32, 33]


def test_a_worker_whose_jobs_have_not_begun_claims_no_more_than_it_ends_until_the_next_reply(clock: Clock):
    plan = ClaimPlan()
    waiting: list[Any] = [FakeJob() for _ in range(3)]
    plan.see(waiting, [])
    assert plan.num_wanted(32) == 0

    waiting[0].has_begun = True
    clock.now_s += 1.0
    plan.end(waiting.pop(0))  # one job per second
    plan.see(waiting, [])
    assert plan.num_wanted(32) == 0
    waiting[0].has_begun = waiting[1].has_begun = True
    plan.see(waiting, [])
    assert plan.num_wanted(32) == 1 + 30


def test_the_jobs_of_the_next_step_are_there_while_a_long_one_runs(clock: Clock):
    plan = ClaimPlan()
    step: list[Any] = [FakeJob(has_begun=True) for _ in range(32)]
    plan.see(step, [])
    clock.now_s += 10.0
    for job in step:
        plan.end(job)
    plan.step_s = 10.0
    plan.see(step, [])  # as many jobs run again

    assert plan.num_wanted(32) == math.ceil(3.2 * (STEPS_AHEAD * 10.0 + AHEAD_S))
    plan.step_s = 1000.0  # it hangs
    assert plan.num_wanted(32) == math.ceil(3.2 * (STEPS_AHEAD * MAX_STEP_S + AHEAD_S))


def test_looks_whether_jobs_have_begun_are_as_far_apart_as_the_engines_steps_allow():
    plan = ClaimPlan()
    looks = []
    for plan.step_s in (0.0, 0.1, 10.0, 1000.0):  # the last one hangs
        looks.append(plan.look_s)
    assert looks == pytest.approx([LOOK_S, LOOK_S, 0.2, 0.4])


def test_jobs_of_excluded_owners_do_not_keep_a_worker_from_claiming_those_of_others(clock: Clock):
    plan = ClaimPlan()
    waiting: list[Any] = [FakeJob(owner="alice", num_rows=200) for _ in range(3)]
    plan.see(waiting, [])
    assert (plan.num_wanted(32), ask(plan, 4).excluded) == (0, [])

    clock.now_s += POLL_S
    plan.see(waiting, [], excluded={"alice"})
    assert plan.num_wanted(32) > 0
    assert ask(plan, 4).excluded == ["alice"]
    plan.take(Claimed([], num_waiting=100), 0.01)  # alice's
    assert plan.due_in_s(4) == pytest.approx(EXCLUDED_S)  # no message tells of another's job

    waiting[0].has_begun = True
    plan.see(waiting, [], excluded={"alice"})
    assert plan.load.num_rows == 200


def test_a_worker_that_cannot_send_its_results_claims_nothing(clock: Clock):
    plan = ClaimPlan()
    plan.see([FakeJob(has_begun=True, is_over=True) for _ in range(33)], [])  # type: ignore[misc]
    assert plan.num_wanted(32) == 0


def test_a_worker_that_is_full_of_the_jobs_of_one_owner_looks_for_those_of_others(clock: Clock):
    plan = ClaimPlan()
    plan.see([FakeJob(has_begun=True, num_rows=1000), FakeJob()], [])  # type: ignore[misc]
    assert plan.num_wanted(32) == 0
    claim = ask(plan, 0)
    assert (claim.max_jobs, claim.excluded, claim.exceeds_share, claim.waits) == (1, ["alice"], True, False)
    plan.take(Claimed([], num_waiting=10), 0.01)
    assert ask(plan, 0).max_jobs == 0
    assert plan.due_in_s(0) == pytest.approx(OTHERS_S)
    assert not plan.queues_are_empty

    clock.now_s += OTHERS_S
    plan.see([FakeJob(has_begun=True, num_rows=1000), FakeJob(), FakeJob(owner="bob")], [])  # type: ignore[misc]
    assert ask(plan, 0).excluded == ["alice", "bob"]
    clock.now_s += OTHERS_S
    assert plan.claim(Claim(max_jobs=0, num_in_flight=9, max_in_flight=9), (), num_free=0).max_jobs == 0


def test_a_worker_that_is_left_nothing_looks_again_and_then_takes_one(clock: Clock):
    plan = ClaimPlan()
    ask(plan, 4)
    plan.take(Claimed([], num_waiting=3), 0.01)
    assert not plan.is_due(4)

    clock.now_s += REFUSED_S
    assert plan.is_due(4)
    claim = ask(plan, 4)
    assert (claim.exceeds_share, claim.max_jobs) == (True, 1)

    plan.take(Claimed(jobs(1), num_waiting=2), 0.01)
    assert not ask(plan, 4).exceeds_share


def test_an_idle_worker_claims_once_a_second_and_at_once_when_it_is_woken(clock: Clock):
    plan = ClaimPlan()
    assert plan.is_due(4)
    assert ask(plan, 4).waits
    plan.take(Claimed([]), 0.01)
    assert plan.due_in_s(4) == pytest.approx(POLL_S)

    plan.wake()
    assert plan.is_due(4)


def test_jobs_that_have_begun_are_reported_once_unless_the_report_was_lost(clock: Clock):
    plan = ClaimPlan()
    job: Any = FakeJob(has_begun=True)
    plan.see([job], ["a:1"])
    assert list(ask(plan).begun) == ["a:1"]
    assert list(ask(plan).begun) == []

    plan.reconcile(["a:1", "b:2"])
    assert plan.is_due(0)
    claim = ask(plan, known=["a:1", "b:2", "c:3"])
    assert (list(claim.begun), claim.known) == (["a:1", "b:2"], ["a:1", "b:2", "c:3"])
    assert ask(plan).known is None


def test_an_idle_worker_asks_for_leases_that_it_does_not_know(clock: Clock):
    """A job that was sent with a message may have been lost with it."""
    plan = ClaimPlan()
    plan.see([], [])
    assert ask(plan).known == []


def test_only_an_idle_worker_takes_over_what_others_have_not_begun(clock: Clock):
    plan = ClaimPlan()
    plan.see([], [])
    assert ask(plan, max_taken_over=32).max_taken_over
    assert not ask(plan, max_taken_over=0).max_taken_over

    busy: Any = FakeJob(has_begun=True)
    plan.see([busy], [])
    assert not ask(plan, max_taken_over=32).max_taken_over


def test_the_speed_is_written_once_a_second_and_again_after_an_error(clock: Clock):
    plan = ClaimPlan()
    assert [ask(plan).writes_speed, ask(plan).writes_speed] == [True, False]
    clock.now_s += POLL_S
    assert [ask(plan).writes_speed, ask(plan).writes_speed] == [True, False]
    plan.reconcile()
    assert ask(plan).writes_speed


def test_a_worker_takes_over_only_what_it_begins_at_once(clock: Clock):
    plan = ClaimPlan()
    plan.see([], [])
    assert plan.num_wanted(8) > 0
    assert ask(plan, max_jobs=20, max_taken_over=512).max_taken_over == 8
    clock.now_s += 10.0
    running: list[Any] = [FakeJob(has_begun=True) for _ in range(6)]
    plan.see(running, [])
    plan.num_wanted(8)
    assert ask(plan, max_jobs=20, max_taken_over=512).max_taken_over == 2
    clock.now_s += 10.0
    plan.num_wanted(6)  # its rows are full, and it keeps a job ahead
    assert ask(plan, max_jobs=1, max_taken_over=512).max_taken_over == 0
