"""The heartbeat's thread reports what the other threads of a worker measure."""

import sys
import threading
from collections.abc import Iterator

import pytest
from redis import Redis

from scorepool.wire import WorkerLink
from scorepool.worker.claims.claim_plan import AHEAD_S, ClaimPlan, Load
from scorepool.worker.claims.leases import Leases
from scorepool.worker.claims.link_report import LinkReport
from scorepool.worker.redis_link.link_speed import LinkSpeed


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


def test_what_is_not_measured_is_not_reported(redis: Redis):
    report = LinkReport(ClaimPlan(), LinkSpeed(), Leases(redis, "mac", "rq:worker:mac", 20.0))

    assert report.read() == WorkerLink(prefetch_jobs=1, lease_s=20.0)


def test_a_report_holds_what_is_measured_and_what_follows(redis: Redis):
    plan, link_speed, leases = ClaimPlan(), LinkSpeed(), Leases(redis, "mac", "rq:worker:mac", 20.0)
    plan.speed.advance(0.0, is_busy=True)
    for second in range(1, 5):
        plan.speed.advance(float(second), is_busy=True)
        for _ in range(10):
            plan.speed.end(work=100.0)
    plan.load = Load(num_jobs=30)
    plan.round_trip_s = 0.5
    link_speed.record(100, 0.4)
    link_speed.record(1_000_000, 2.4)
    leases.length.begin(0.0)
    leases.length.end(6.0)

    found = LinkReport(plan, link_speed, leases).read()

    assert found == WorkerLink(
        round_trip_s=0.4,
        upload_bytes_per_s=pytest.approx(500_000),  # type: ignore[arg-type]
        jobs_per_s=10.0,
        tokens_per_s=1000.0,
        prefetch_jobs=round(10 * (2 * 0.5 + AHEAD_S)),
        lease_s=30.0,
        drain_s=3.0,
    )


@pytest.mark.usefixtures("frequent_switches")
def test_a_report_can_be_read_while_jobs_end(redis: Redis):
    plan = ClaimPlan()
    report = LinkReport(plan, LinkSpeed(), Leases(redis, "mac", "rq:worker:mac", 20.0))
    plan.speed.advance(0.0, is_busy=True)

    def end_jobs() -> None:
        for second in range(20_000):
            plan.speed.advance(float(second), is_busy=True)
            plan.speed.end(1.0)

    thread = threading.Thread(target=end_jobs)
    thread.start()
    while thread.is_alive():
        report.read()
    thread.join()
