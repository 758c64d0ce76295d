"""The settings of published checkpoints are served, and right: in tiny sizes, against transformers."""

from collections.abc import Iterator

import pytest

from scorepool.engine.model import surveyed
from scorepool.engine.model.contradictions import refuse_contradictions
from survey.measure import Loader
from survey.published import PUBLISHED, measure


@pytest.fixture(scope="module")
def loader() -> Iterator[Loader]:
    with Loader() as started:
        yield started


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_settings_of_a_published_checkpoint_are_followed(name: str, loader: Loader):
    measured = measure(name, loader)
    assert measured.outcome[0] == "agrees", measured.outcome


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_not_refused(name: str):
    refuse_contradictions(PUBLISHED[name])
    surveyed.check(PUBLISHED[name])
