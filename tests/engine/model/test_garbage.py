"""What a model leaves behind is collected, also in a process that keeps its objects out of collections."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from scorepool.engine.model.garbage import collect  # tests/conftest.py replaces it in the module


class Part:
    def __init__(self) -> None:
        self.whole = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_parts_that_refer_to_each_other_are_freed_and_the_rest_stays_as_it_was(is_frozen: bool):
    kept, part = Part(), Part()
    seen = weakref.ref(part)
    if is_frozen:
        gc.freeze()
    del part
    collect()
    assert seen() is None
    is_looked_at = any(one is kept for one in gc.get_objects())
    assert is_looked_at is not is_frozen
