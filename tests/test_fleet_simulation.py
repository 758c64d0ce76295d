"""The simulation of a fleet, against queueing theory and its own limits. Costs are made up, so no Redis is needed."""

import sys

import pytest
from msgspec.structs import replace

from bench import fleet
from bench.fleet_simulation.__main__ import WORKLOADS, fleet_of, parse
from bench.fleet_simulation.costs import Costs
from bench.fleet_simulation.simulation import Fleet, Simulation, Workload

FREE = Costs(**dict.fromkeys(Costs.__struct_fields__, 0.0))
JOBS = Workload(name="", rows=4, step_s=0.05, num_steps=40)
FLEET = Fleet(num_workers=20, workload=JOBS, load=0.5, rtt_s=0.001, seconds=60.0)


def test_without_costs_a_fleet_ends_what_is_submitted_in_the_time_of_a_job():
    found = Simulation(FLEET, FREE).run()
    assert found.offered_per_s == 20.0
    assert found.ended_per_s == pytest.approx(20.0, rel=0.15)
    assert found.total_p50_s == pytest.approx(JOBS.job_s, rel=0.05)
    assert found.redis_busy == 0.0


def test_redis_is_as_busy_as_the_messages_of_the_jobs():
    costs = replace(FREE, submit=0.001, finish_job=0.002, read=0.003)
    found = Simulation(FLEET, costs).run()
    assert found.redis_busy == pytest.approx(0.006 * found.ended_per_s, rel=0.15)


def test_above_its_limit_redis_ends_no_more_than_it_can():
    found = Simulation(FLEET, replace(FREE, finish_job=0.1)).run()  # ten jobs a second
    assert found.redis_busy > 0.95
    assert found.ended_per_s == pytest.approx(10.0, rel=0.1)


def test_overload_of_the_workers_fills_the_queue():
    found = Simulation(replace(FLEET, load=1.5), FREE).run()
    assert found.ended_per_s == pytest.approx(20 * JOBS.jobs_per_s, rel=0.1)
    assert found.wait_p99_s > 5


def test_jobs_of_silent_workers_wait_for_their_leases():
    calm = Simulation(FLEET, FREE).run()
    found = Simulation(replace(FLEET, silent_per_hour=60.0, silent_s=15.0, seconds=120.0), FREE).run()
    assert found.wait_p99_s > FLEET.lease_s * 0.7 > calm.wait_p99_s
    assert found.ended_per_s == pytest.approx(20.0, rel=0.15)


def test_a_round_trip_is_what_a_lone_job_waits_beyond_its_own_time():
    found = Simulation(replace(FLEET, load=0.01, rtt_s=0.2, seconds=300.0), FREE).run()
    assert found.wait_p50_s == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("text", ["", "x", "0", "-5", "10,", "1.5", "10 20", "100001", "9" * 30])
def test_numbers_of_workers_that_are_none_are_refused_with_a_sentence(text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        parse(["--workers", text] if not text.startswith("-") else [f"--workers={text}"])
    assert end.value.code == 2
    assert "expected numbers from 1 to 100000, separated by commas" in capsys.readouterr().err


def test_numbers_of_workers_are_read():
    assert parse(["--workers", "1, 30,10000"]).workers == [1, 30, 10_000]


def test_a_scenario_beside_simulate_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["fleet", "--simulate", "nap"])
    with pytest.raises(SystemExit):
        fleet.main()
    assert "--simulate takes no scenario: nap" in capsys.readouterr().err


def test_no_more_jobs_are_simulated_than_twice_what_redis_can_take():
    """A fleet of 10,000 workers would submit 700,000 a second, and its simulation take an hour."""
    costs = replace(FREE, submit=0.001, finish_job=0.001)
    assert fleet_of(costs, WORKLOADS[0], 10_000).max_jobs_per_s == pytest.approx(2 / 0.002)
