"""Every way in which rows of every family run has transformers' numbers, with other weights than those of the table."""

import pytest

from survey.engine_rows import EngineProcess
from survey.families import FAMILIES
from survey.ways import compare

SEED = 1


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_way_to_run_rows_of_a_family_equals_transformers(name: str):
    with EngineProcess() as process:
        outcomes = {
            base: compare(FAMILIES[name], base, SEED, process, in_16_bits=base == "base")
            for base in FAMILIES[name].bases()
        }
    assert {base: outcome for base, outcome in outcomes.items() if not outcome.is_right} == {}
