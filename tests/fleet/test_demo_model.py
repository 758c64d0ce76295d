"""The demo model computes the same numbers on hosts that nap, behind links that fail, and no job is lost."""

import time
from pathlib import Path

import pytest

from scorepool import wire
from tests.fleet.fleet import MODEL, Fleet

SETTINGS = {"SCOREPOOL_LEASE_S": "1", "SCOREPOOL_MAX_RUNNING_ROWS": "8"}
TEXTS = [f"def add_{number}(a, b):" for number in range(60)]


def request_of(text: str) -> wire.Score:
    item = wire.ScoreItem(prompt=text, completion="\n    return a + b\n")
    return wire.Score(model=MODEL, items=[item], top_logprobs=5, wait_for_model=True)


def sums(fleet: Fleet, job_ids: list[str]) -> list[float]:
    outcomes = [fleet.outcome(job_id) for job_id in job_ids]
    assert all(isinstance(outcome, wire.Result) for outcome in outcomes), outcomes
    return [round(outcome.sequences[0].logprob_sum, 3) for outcome in outcomes if isinstance(outcome, wire.Result)]


@pytest.mark.soak
def test_naps_and_bad_links_change_no_number_and_lose_no_job(root: Path, tmp_path: Path):
    settings = SETTINGS | {"SCOREPOOL_MODEL": f"{MODEL}={root / 'scorepool' / 'models' / 'demo'}"}
    with Fleet(tmp_path, settings) as fleet:
        first = fleet.host("a", worker="ModelWorker")
        fleet.wait_until_up()
        calm_ids = fleet.submit(*map(request_of, TEXTS))
        fleet.wait_until_done(calm_ids)
        second = fleet.host("b", worker="ModelWorker", link={"delay_s": 0.05, "up_bytes_s": 100_000.0})
        fleet.wait_until_up()

        job_ids = []
        for number in range(5):
            job_ids += fleet.submit(*map(request_of, TEXTS))
            (first if number % 2 else second).sleep(1.5)
            time.sleep(0.3)
            if number == 1:
                first.link.cut()
            if number == 2:
                second.link.lose_next_reply(lambda reply: len(reply) > 500)
            if number == 3:
                first.link.pause()
        first.link.restore()
        fleet.wait_until_done(job_ids, 60)

        assert sums(fleet, job_ids) == sums(fleet, calm_ids) * 5
