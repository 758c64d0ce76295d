"""A worker shows in GET /v1/models and /metrics what it measures of its link, and follows it."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.api.test_process import running, serves
from tests.fleet.fleet import Fleet, generate, score, until

DELAY_S = 0.15  # one way


@pytest.mark.soak  # 30 s
def test_a_distant_worker_shows_its_link_its_speed_and_its_longer_leases(root: Path, tmp_path: Path):
    with (
        Fleet(tmp_path, {"FLEET_STEP_S": "0.02", "SCOREPOOL_LEASE_S": "2"}) as fleet,
        running(root, fleet.server.url, tmp_path / "api.log") as (http, _),
    ):
        fleet.host("near")
        far = fleet.host("far", link={"delay_s": DELAY_S})
        fleet.wait_until_up()
        until(lambda: serves(http, "demo"))

        def link_of(worker: str) -> dict[str, Any]:
            listed = http.get("/v1/models").json()["models"]
            [link] = [model["link"] for model in listed if model["worker"] == worker]
            return link

        until(lambda: (link_of("far")["round_trip_s"] or 0) > 2 * DELAY_S)
        until(lambda: link_of("far")["lease_s"] > 3 * (0.4 + 2 * 2 * DELAY_S))  # a heartbeat takes several round trips
        text = http.get("/metrics").text
        near = link_of("near")
        assert near["round_trip_s"] < DELAY_S
        assert near["jobs_per_s"] is None
        assert near["drain_s"] is None
        assert float(re.findall(r'worker_round_trip_seconds{model="demo"} (\S+)', text)[0]) > 2 * DELAY_S

        fleet.hosts[0].kill()
        fleet.wait_until_done(fleet.submit(*[generate(10) for _ in range(60)]))
        until(lambda: link_of("far")["jobs_per_s"] is not None)
        found = link_of("far")
        assert found["jobs_per_s"] > 1
        assert found["tokens_per_s"] > 10 * found["jobs_per_s"]
        assert found["prefetch_jobs"] >= found["jobs_per_s"] * 4 * DELAY_S
        fleet.submit(generate(2000))
        until(lambda: link_of("far")["drain_s"] > 0)

        far.link.change(up_bytes_s=300_000)
        fleet.submit(score(9000, top_logprobs=20))
        until(lambda: (link_of("far")["upload_bytes_per_s"] or 1e9) < 600_000)
        far.link.change(delay_s=0.0, up_bytes_s=None)
        until(lambda: link_of("far")["lease_s"] == 2.0)  # the slow heartbeats are forgotten


@pytest.mark.soak  # 30 s
def test_a_worker_whose_heartbeats_take_longer_than_a_lease_keeps_its_jobs(tmp_path: Path):
    with Fleet(tmp_path, {"FLEET_STEP_S": "0.02", "SCOREPOOL_LEASE_S": "1"}) as fleet:
        far = fleet.host("far", link={"delay_s": DELAY_S})
        fleet.wait_until_up()
        [job_id] = fleet.submit(generate(400))
        until(lambda: fleet.holder(job_id) == "far")
        fleet.host("near")
        fleet.wait_until_done([job_id])

        assert "goes to another worker" not in far.log
        assert "its lease is lost" not in far.log
        assert fleet.fields(job_id)["worker_name"] == "far"
