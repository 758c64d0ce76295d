"""A machine that sleeps: `time.monotonic` stands still meanwhile, Redis and the clients go on."""

import logging
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from redis import Redis

import scorepool.store.clock
from scorepool import store, wire
from scorepool.store.clock import awake_s, clock_s
from scorepool.worker.claims.claim_plan import ClaimPlan
from scorepool.worker.claims.heartbeat_clock import HeartbeatClock
from scorepool.worker.machine.periodic_tasks import PeriodicTask, PeriodicTasks
from scorepool.worker.machine.watchdog import STALLED, Watchdog
from scorepool.worker.rq.errors import Expired, Stopped
from scorepool.worker.rq.in_flight import InFlightJob
from tests.worker.conftest import Workers, done, failure, generate, outcome, status, submit, until

NIGHT_S = 8 * 3600
log = logging.getLogger("test")


class Machine:
    slept_s = 0.0

    def sleep(self, for_s: float = NIGHT_S) -> None:
        self.slept_s += for_s


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    clocks = SimpleNamespace(
        monotonic=time.monotonic, clock_gettime=lambda which: time.clock_gettime(which) + machine.slept_s
    )
    monkeypatch.setattr(scorepool.store.clock, "time", clocks)
    return machine


def in_flight() -> InFlightJob:
    return InFlightJob(SimpleNamespace(), None, None)  # type: ignore[arg-type]


def test_a_periodic_task_runs_as_soon_as_the_machine_is_awake(machine: Machine):
    ran = threading.Semaphore(0)
    task = PeriodicTask(ran.release, every_s=3600)
    with PeriodicTasks([task], log):
        assert ran.acquire(timeout=10)
        time.sleep(0.5)  # it waits for its next turn
        machine.sleep()
        assert ran.acquire(timeout=10)
        assert not ran.acquire(timeout=1.5)  # once, and not for each hour of the night


def test_a_job_that_slept_has_not_run_longer_than_its_timeout(machine: Machine):
    inflight = in_flight()
    inflight.set_deadline(600, Stopped(), awake_s)
    machine.sleep()

    assert 500 < inflight.check_deadlines() <= 600
    assert not inflight.is_over


def test_a_job_whose_client_gave_up_during_the_night_fails(machine: Machine):
    inflight = in_flight()
    inflight.set_deadline(10 * NIGHT_S, Stopped(), awake_s)
    inflight.set_deadline(600, Expired(), clock_s)
    inflight.check_deadlines()
    assert not inflight.is_over
    machine.sleep()
    inflight.check_deadlines()

    assert isinstance(inflight.error, Expired)


@pytest.mark.parametrize("hangs", [False, True])
def test_the_watchdog_ends_a_process_that_hangs_and_not_one_that_slept(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, hangs: bool
):
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    began_at = time.monotonic() - (61 if hangs else 0)  # as the engine notes it
    machine.sleep()
    Watchdog(60, lambda: {"a step": began_at}, lambda: None, log).check()

    assert ended == ([STALLED] if hangs else [])


def test_nobody_is_declared_dead_by_a_machine_that_has_just_woken(machine: Machine):
    """The other workers may have slept as well: their leases ended while nobody could extend them."""
    clock = HeartbeatClock(lease_s=20)
    clock.record()
    assert clock.is_on_time(lambda: None)
    machine.sleep()
    assert not clock.is_on_time(lambda: None)
    clock.record()
    assert not clock.is_on_time(lambda: None)
    for _ in range(3):
        machine.sleep(9)  # less than half a lease, as between two heartbeats
        clock.record()
    assert clock.is_on_time(lambda: None)


def test_a_night_with_jobs_in_flight_does_not_make_a_worker_slow(machine: Machine):
    """Each worker claims by its measured speed: an hour asleep is none of work."""
    job = SimpleNamespace(work=1.0)
    inflight = InFlightJob(job, None, None, is_over=True)  # type: ignore[arg-type]
    plan = ClaimPlan()
    plan.see([inflight], [])
    machine.sleep()
    time.sleep(0.05)
    plan.end(inflight)

    jobs_per_s = plan.speed.jobs_per_s
    assert jobs_per_s is not None
    assert jobs_per_s > 0.1


def test_a_worker_goes_on_after_the_night(redis: Redis, workers: Workers):
    """What ran goes on, what expired fails, heartbeats and chores are on time."""
    settings = {"SCOREPOOL_STALL_TIMEOUT_S": "30", "FAKE_STEP_S": "0.05"}
    running = submit(redis, generate(max_tokens=100))
    expiring = submit(redis, generate(max_tokens=100_000), fields={"expires_at": repr(time.time() + 3600)})
    process = workers.start("--name", "mac", worker="SleepingWorker", **settings)
    until(lambda: all(f"job={one}: begins " in workers.log for one in (running, expiring)))
    until(lambda: status(redis, running) == status(redis, expiring) == "started")
    process.send_signal(signal.SIGUSR2)

    until(lambda: outcome(redis, running) and outcome(redis, expiring))
    assert isinstance(outcome(redis, running), wire.Result)
    assert failure(redis, expiring).code == "expired"
    beat = redis.hget("rq:worker:mac", "last_heartbeat")
    until(lambda: redis.hget("rq:worker:mac", "last_heartbeat") != beat)
    after = submit(redis, generate())
    until(lambda: isinstance(outcome(redis, after), wire.Result))
    assert process.poll() is None


def test_a_worker_that_slept_while_it_drained_hands_its_jobs_back_and_ends(redis: Redis, workers: Workers):
    running = submit(redis, generate(max_tokens=100_000))
    process = workers.start(worker="SleepingWorker", SCOREPOOL_DRAIN_TIMEOUT_S="600")
    until(lambda: f"job={running}: begins " in workers.log)  # what has not begun is put back at once
    process.terminate()
    until(lambda: b"shutdown_requested_date" in redis.hgetall(redis.smembers("rq:workers").pop()))
    process.send_signal(signal.SIGUSR2)

    assert process.wait(30) == 0
    assert status(redis, running) == "queued"


def test_a_mac_that_goes_to_sleep_hands_its_jobs_back_and_claims_again_when_it_is_awake(redis: Redis, workers: Workers):
    ids = [submit(redis, generate(max_tokens=100_000)) for _ in range(4)]
    mac = workers.start(worker="NappingWorker", SCOREPOOL_LEASE_S="60")
    until(lambda: redis.zcard("rq:wip:demo") == 4)

    mac.send_signal(signal.SIGUSR1)
    until(lambda: [status(redis, id_) for id_ in ids] == ["queued"] * 4)
    for id_ in ids:
        redis.set(store.Keys.request(id_), wire.encode(generate()))  # they end when they run again
    ids.append(submit(redis, generate()))
    time.sleep(1.5)  # longer than it waits between claims
    assert [status(redis, id_) for id_ in ids] == ["queued"] * 5

    mac.send_signal(signal.SIGUSR2)
    until(lambda: len(done(redis)) == 5)
    assert sorted(done(redis)) == sorted(ids)
    assert {redis.hget(f"rq:job:{id_}", store.JobField.MAX_CONCURRENCY) for id_ in ids} == {None}
