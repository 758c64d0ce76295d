"""No family is served that differs from transformers, whatever setting is changed. A quarter of an hour per core."""

import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest

from survey.families import FAMILIES
from survey.run import survey
from survey.table import FOLDER

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

SEED = datetime.now(UTC).date().toordinal()  # other numbers each day


@pytest.mark.parametrize("table", sorted(FOLDER.glob("*.json")), ids=lambda table: table.stem)
def test_the_tables_were_made_with_the_installed_mlx_lm(table: Path):
    """CONTRIBUTING.md says how to survey a new release."""
    assert json.loads(table.read_text())["versions"]["mlx-lm"] == version("mlx-lm")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_change_of_a_setting_is_served_and_wrong(family: str):
    wrong = [found for found in survey(FAMILIES[family], seed=SEED, checks_settings=True) if found.is_wrong]
    assert wrong == []
