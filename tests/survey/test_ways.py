"""The findings on ways tell right from wrong, and a crash from a refusal."""

import json
from pathlib import Path

import pytest

from survey import ways
from survey.engine_rows import EngineProcess, Row, Served
from survey.families import FAMILIES
from survey.ways import Outcome


@pytest.mark.soak
def test_the_ways_of_a_family_are_compared_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ways, "RESULTS", tmp_path / "results" / "ways.json")
    with EngineProcess() as process:
        outcome = ways.compare(FAMILIES["llama"], "base", 3, process, in_16_bits=True)
    ways.write("llama", {"base": outcome})
    ways.write("glm", {"base": Outcome("", "a reason")})

    assert outcome.is_right
    assert outcome.mode == "default"
    assert outcome.replaced == []
    assert len(outcome.errors) == 8  # four ways, in default and in exact mode
    assert set(outcome.ratios) == {"bfloat16", "float16"}
    kept = json.loads(ways.RESULTS.read_text())
    assert list(kept) == ["glm", "llama"]
    assert kept["glm"] == {"base": {"note": "a reason"}}
    assert kept["llama"]["base"]["errors"] == outcome.errors


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome("default", errors={"alone": 1e-6, "exact batch": 2e-4}),
        Outcome("default", errors={"alone": float("nan")}),
        Outcome("default", ratios={"bfloat16": 1.6}),
        Outcome("", "crashes: the process died"),
    ],
)
def test_errors_and_crashes_are_not_right(outcome: Outcome):
    assert not outcome.is_right


def test_a_refusal_is_right_and_a_crash_in_one_mode_is_told():
    assert Outcome("", "config.json: n_groups is 2").is_right
    assert ways.failure(Served(crash="ValueError: no"), "exact mode: ") == "crashes: exact mode: ValueError: no"
    assert ways.failure(Served(rows=[Row("alone", [0, 1], 1, [-1.0])])) == ""
