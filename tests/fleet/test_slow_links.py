"""Results and requests cross a slow link at its speed, and a hole in it costs one message."""

import threading
from pathlib import Path

import pytest

from scorepool import store, wire
from tests.fleet import throughput
from tests.fleet.fleet import Fleet, generate, score, until

FAST = throughput.FAST


@pytest.mark.soak  # measures time
def test_results_end_at_the_speed_of_a_slow_uplink(tmp_path: Path):
    found = throughput.uplink(tmp_path, num_jobs=16, mbit_s=4, timeout_s=60)

    assert found["ended"] == 16
    assert found["seconds"] < 1.25 * found["link_s"] + 1.5  # computing, and finding out what the link carries
    assert found["sent_twice"] < 1.2


def test_results_cross_a_slow_uplink_once(tmp_path: Path):
    found = throughput.uplink(tmp_path, num_jobs=16, mbit_s=4, timeout_s=200)

    assert found["ended"] == 16
    assert found["sent_twice"] < 1.5


@pytest.mark.parametrize("kind", ["drop", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("pause", "cut"))])
@pytest.mark.soak
def test_a_hole_in_an_upload_costs_one_message(tmp_path: Path, kind: str):
    with Fleet(tmp_path, FAST) as fleet:
        host = fleet.host("narrow", SCOREPOOL_LEASE_S="10")
        fleet.wait_until_up()
        host.link.change(up_bytes_s=400_000)
        [running] = fleet.submit(generate(500))
        num_before = host.link.num_bytes_up
        [job_id] = fleet.submit(score(9000, top_logprobs=20))
        until(lambda: host.link.num_bytes_up - num_before > 700_000)
        getattr(host.link, kind)()
        threading.Timer(3.0, host.link.restore).start()
        fleet.wait_until_done([job_id, running], 60)

        size = fleet.redis.strlen(store.Keys.outcome(job_id))
        assert size > 1_500_000
        assert host.link.num_bytes_up - num_before < size + 600_000  # a second of the link, and what is in its buffers
        outcome = fleet.outcome(job_id)
        assert isinstance(outcome, wire.Result)
        assert "put back" not in host.log


def test_requests_cross_a_slow_link_once_although_their_leases_are_short(tmp_path: Path):
    settings = {"FLEET_STEP_S": "0.001", "FLEET_TOKEN_S": "0.0000001", "SCOREPOOL_LEASE_S": "6"}
    with Fleet(tmp_path, settings) as fleet:
        host = fleet.host("narrow")
        fleet.wait_until_up()
        host.link.change(down_bytes_s=300_000, delay_s=0.02)
        num_before = host.link.num_bytes_down
        job_ids = fleet.submit(*[score(10, prompt_tokens=30_000)] * 40)
        size = 40 * fleet.redis.strlen(store.Keys.request(job_ids[0]))

        fleet.wait_until_done(job_ids, 120)
        assert host.link.num_bytes_down - num_before < 1.5 * size
