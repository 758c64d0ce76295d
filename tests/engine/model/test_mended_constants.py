"""Settings that mlx-lm's code has as constants are followed."""

import pytest

from survey.families import FAMILIES
from survey.run import survey


@pytest.mark.soak
@pytest.mark.parametrize("name", ["nanochat", "recurrent_gemma"])
def test_the_configured_epsilon_of_the_norms_is_computed(name: str):
    tried = [found for found in survey(FAMILIES[name], 0, checks_settings=False, only="rms_norm_eps") if found.matters]
    changed = [found for found in tried if found.setting == "rms_norm_eps" and not found.is_default]
    assert changed
    assert [found for found in tried if found.outcome != "agrees"] == []
