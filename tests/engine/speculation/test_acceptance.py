"""What proposals cost where they are wrong: one token now and then, ever more seldom."""

from itertools import pairwise

import pytest

from scorepool.engine.speculation.acceptance import AcceptanceRate


def run(known: AcceptanceRate, num_steps: int, max_width: int = 8, *, is_right: bool) -> list[int]:
    """Let steps verify what is worthwhile; return how many tokens each has proposed."""
    sizes: list[int] = []
    for _ in range(num_steps):
        num_proposed = min(known.num_worthwhile(max_width), known.max_proposed)
        known.record(num_proposed, num_proposed if is_right else 0)
        sizes.append(num_proposed)
    return sizes


def test_right_proposals_double_and_become_as_many_as_are_allowed():
    assert run(AcceptanceRate(), 6, is_right=True) == [1, 2, 4, 8, 8, 8]


def test_wrong_proposals_are_tried_one_at_a_time_and_ever_more_seldom():
    sizes = run(AcceptanceRate(), 1000, is_right=False)
    assert set(sizes) == {0, 1}
    steps = [number for number, size in enumerate(sizes) if size]
    assert [later - step for step, later in pairwise(steps)] == [33, 65, 129, 257, 513]


def test_a_row_that_becomes_right_is_noticed():
    known = AcceptanceRate()
    run(known, 100, is_right=False)
    assert run(known, 200, is_right=True)[-1] == 8


@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_the_rate_follows_a_draft_that_is_sometimes_right(rate: float):
    known = AcceptanceRate()
    run(known, 10, is_right=True)
    for number in range(400):
        known.record(1, int(number * rate) != int((number - 1) * rate))
    assert known.rate == pytest.approx(rate, abs=0.2)
