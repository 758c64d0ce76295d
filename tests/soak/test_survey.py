"""No family is served that differs from transformers, whatever setting is changed. A quarter of an hour per core."""

from datetime import UTC, datetime

import pytest

from survey.families import FAMILIES
from survey.run import survey

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

SEED = datetime.now(UTC).date().toordinal()  # other numbers each day


@pytest.mark.parametrize("family", FAMILIES)
def test_no_change_of_a_setting_is_served_and_wrong(family: str):
    wrong = [found for found in survey(FAMILIES[family], seed=SEED, checks_settings=True) if found.is_wrong]
    assert wrong == []
