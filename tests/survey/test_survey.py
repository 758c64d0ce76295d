"""Nothing is served that differs from transformers: families in turn, another one each day.

`make soak` surveys all of them.
"""

import json
from datetime import UTC, datetime

import pytest

from survey import run, ways
from survey.families import FAMILIES
from survey.run import NotBuilt, survey

DAY = datetime.now(UTC).date().toordinal()
WAYS = json.loads(ways.RESULTS.read_text())
OF_TODAY = list(FAMILIES)[5 * DAY % len(FAMILIES)]  # neighbours are alike


@pytest.mark.timeout(600)  # a family with many bases takes most of a minute
@pytest.mark.parametrize("family", [OF_TODAY])
@pytest.mark.soak
def test_no_change_of_a_setting_is_served_and_wrong(family: str):
    try:
        findings = list(survey(FAMILIES[family], seed=DAY, checks_settings=True))
    except NotBuilt as error:
        pytest.fail(f"transformers cannot build {family}: {error}")
    assert [found for found in findings if found.is_wrong] == []
    refused = {found.base for found in findings if not found.setting and found.outcome == "refused"}
    assert refused == {base for base, way in WAYS[family].items() if not way["mode"]}


@pytest.mark.soak
def test_the_survey_finds_a_setting_that_the_engine_ignores(monkeypatch: pytest.MonkeyPatch):
    """Without the table, mlx-lm follows a setting that transformers does not know."""
    monkeypatch.setattr(run, "LENGTHS", (9,))
    raw = survey(FAMILIES["llama"], seed=0, checks_settings=False, only="rope_traditional")
    assert [(found.value, found.outcome) for found in raw if found.setting == "rope_traditional"] == [
        (False, "agrees"),
        (True, "differs"),
    ]
    checked = survey(FAMILIES["llama"], seed=0, checks_settings=True, only="rope_traditional")
    outcomes = {found.value: found.outcome for found in checked if found.setting == "rope_traditional"}
    assert outcomes == {False: "agrees", True: "refused"}
