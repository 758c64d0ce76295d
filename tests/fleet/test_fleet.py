"""What issue 13 asks of a fleet whose hosts sleep, stall, are slow or far away: the scenarios of bench.fleet, small.

Bounds on time are wide, because a test machine is busy. `python -m bench.fleet` measures.
"""

import re
import time
from pathlib import Path

import pytest

from scorepool import store, wire
from tests.fleet import faults, throughput
from tests.fleet.fleet import Fleet, Host, generate, score, until


@pytest.mark.soak  # 16 s; test_slow_links.py has one four times as wide
def test_results_pass_a_narrow_uplink_at_its_speed(tmp_path: Path):
    found = throughput.uplink(tmp_path, num_jobs=10, mbit_s=1.0, timeout_s=30)

    assert found["ended"] == 10
    assert found["seconds"] < 1.5 * found["link_s"]
    assert found["sent_twice"] < 1.5


@pytest.mark.soak  # compares speeds; tests/store/test_speeds.py and tests/worker/claims have the shares without a clock
def test_a_slow_host_does_not_hoard(tmp_path: Path):
    found = throughput.slow_host(tmp_path, num_jobs=60)

    assert found["slow_jobs"] <= 20  # 5 of 60 are its share, more while the machine has other work
    assert found["seconds"] < 2 * found["alone_s"]


@pytest.mark.soak  # as the one above
def test_jobs_are_spread_over_idle_workers(tmp_path: Path):
    found = throughput.bulk(tmp_path, num_jobs=40, num_workers=5, max_tokens=10)

    assert found["idle_workers"] == 0
    assert found["largest_share"] <= 20


def test_a_worker_goes_on_while_another_naps_and_takes_its_job_over(tmp_path: Path):
    with Fleet(tmp_path, faults.STEADY | {"SCOREPOOL_LEASE_S": "1"}) as fleet:
        sleeper = fleet.host("b")
        fleet.wait_until_up()
        (long_id,) = fleet.submit(generate(150))
        until(lambda: fleet.holder(long_id) == "b")
        sleeper.stop()
        worker = fleet.host("c")
        fleet.wait_until_up([worker])
        job_ids = fleet.submit(*[score(20)] * 300)
        fleet.wait_until_done([*job_ids, long_id])
        assert {fleet.fields(job_id)["worker_name"] for job_id in (*job_ids, long_id)} == {"c"}
        sleeper.wake()
        gives_up = re.compile(rf"{long_id}.*(lease is lost|lease was lost|goes to another worker)")
        until(lambda: gives_up.search(sleeper.log))
        assert len(fleet.ends()) == 301


@pytest.mark.soak  # compares speeds
def test_a_nap_of_one_worker_does_not_slow_another(tmp_path: Path):
    found = faults.nap(tmp_path, nap_s=5.0, lease_s=1.0)

    assert found["share"] > 0.8


def test_a_job_whose_workers_nap_is_not_crashed(tmp_path: Path):
    found = faults.naps(tmp_path, num_naps=4, lease_s=1.5, last_s=2.0, crash_limit=2)

    assert found["end"] == "result"


@pytest.mark.parametrize(
    ("resets", "is_message"),
    [
        (False, False),
        (True, True),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((False, True), (True, False))),
    ],
)
def test_jobs_that_were_lost_on_their_way_to_a_worker_run_at_once(tmp_path: Path, resets: bool, is_message: bool):
    found = faults.lost_reply(tmp_path, lease_s=200.0, resets=resets, is_message=is_message)

    assert found["was_lost"]
    assert found["seconds"] < 100  # not when the leases end


def test_a_worker_computes_what_it_claimed_ahead_while_it_waits_for_redis(tmp_path: Path):
    tokens, num_jobs, rows = 400, 3, "2"
    settings = {"FLEET_STEP_S": "0.005", "SCOREPOOL_LEASE_S": "120", "SCOREPOOL_MAX_RUNNING_ROWS": rows}
    with Fleet(tmp_path, settings) as fleet:
        host = fleet.host("far")
        fleet.wait_until_up()
        job_ids = fleet.submit(*[generate(tokens)] * num_jobs)
        until(lambda: all(fleet.holder(job_id) for job_id in job_ids))
        num_steps = steps(host)
        until(lambda: steps(host) > num_steps + 20)  # so that the reply to its claim has come
        host.link.pause()
        until(lambda: host.stats()[-1].row_steps == num_jobs * (tokens + 1))
        host.link.restore()
        fleet.wait_until_done(job_ids)
        assert {type(fleet.outcome(job_id)) for job_id in job_ids} == {wire.Result}


def steps(host: Host) -> int:
    return host.stats()[-1].steps if host.stats() else 0


@pytest.mark.soak  # compares speeds; tests/worker/claims/test_claim_plan.py has worker and link on a clock of its own
def test_a_distant_worker_is_as_fast_as_a_near_one(tmp_path: Path):
    near = throughput.round_trips(tmp_path / "near", rtt_s=0.0, num_jobs=600, num_lone=1)
    far = throughput.round_trips(tmp_path / "far", rtt_s=0.08, num_jobs=600, num_lone=5)

    assert far["jobs_s"] > 0.6 * near["jobs_s"]
    assert far["lone_rtts"] < 2.5


@pytest.mark.soak
def test_a_job_does_not_wake_all_workers(tmp_path: Path):
    found = throughput.herd(tmp_path, num_workers=8, num_jobs=12, settle_s=1.0)

    assert found["scripts_a_job"] < 5.5  # about 2; every worker would run 8
    assert found["commands_a_job"] < 150


def test_times_are_those_of_redis_whatever_the_clock_of_a_worker(tmp_path: Path):  # row 8
    found = faults.clocks(tmp_path)

    assert abs(found["started_off_s"]) < 60  # its clock is 300 s ahead
    assert abs(found["ended_off_s"]) < 60
    assert abs(found["heartbeat_age_s"]) < 60


@pytest.mark.parametrize("is_busy", [False, True])
def test_sigterm_ends_a_worker_in_time_while_redis_is_silent(tmp_path: Path, is_busy: bool):
    found = faults.sigterm(tmp_path, drain_s=2.0, is_busy=is_busy, timeout_s=100.0)

    assert found["status"] == 0


@pytest.mark.parametrize("kind", ["cut", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("pause", "drop"))])
def test_tokens_computed_in_a_hole_are_streamed_when_it_is_over(tmp_path: Path, kind: str):  # row 10
    with Fleet(tmp_path, {"FLEET_TOKEN_S": "0", "SCOREPOOL_LEASE_S": "200"}) as fleet:
        host = fleet.host("a")
        fleet.wait_until_up()
        (job_id,) = fleet.submit(generate(100_000, stream=True))
        arrivals = faults.Arrivals(fleet, job_id)
        until(lambda: arrivals.num_seen > 20)
        host.link.pause() if kind == "pause" else host.link.drop()
        num_steps = steps(host)
        until(lambda: steps(host) > num_steps + 150)
        num_steps = steps(host)
        if kind == "cut":
            host.link.cut()
        host.link.restore()
        until(lambda: arrivals.num_seen >= num_steps - 1)  # the first step has the prompt; the job runs on
        arrivals.close()
        assert host.fleet.ends() == {}


@pytest.mark.soak  # measures how soon
@pytest.mark.parametrize("kind", ["cut", "pause", "drop"])
def test_tokens_computed_in_a_hole_are_streamed_as_soon_as_it_is_over(tmp_path: Path, kind: str):
    found = faults.hole(tmp_path, hole_s=4.0, kind=kind)

    assert found["silence_s"] < 4
    assert found["missing"] < 0.3


@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_whose_registration_has_expired_leaves_none_for_ever(tmp_path: Path, fails: bool):
    with Fleet(tmp_path, {"SCOREPOOL_LEASE_S": "60"}) as fleet:  # so that no heartbeat comes in time
        fleet.host("a")
        fleet.wait_until_up()
        (job_id,) = fleet.submit(generate(100_000, timeout_s=2) if fails else generate(50))
        until(lambda: fleet.holder(job_id) == "a")
        fleet.redis.delete(store.RqKeys.worker("a"))
        fleet.wait_until_done([job_id])

        assert isinstance(fleet.outcome(job_id), wire.Failure) == fails
        time.sleep(0.3)
        assert fleet.redis.ttl(store.RqKeys.worker("a")) != -1
