"""The width of a step is the one that gives the most tokens per second, by what steps have cost."""

from itertools import pairwise
from random import Random

import pytest

from scorepool.engine.speculation.cost import StepCost, choose_width


def learned(base: float, slope: float) -> StepCost:
    """Return what is learned from noisy steps of that cost, plain ones and others."""
    cost, draw = StepCost(), Random(0)
    for number in range(200):
        tokens = draw.choice([2, 4, 10, 18] if number % 2 else [1, 2, 8])
        seconds = (base + slope * tokens) * draw.uniform(0.97, 1.03) * (20 if draw.random() < 0.02 else 1)
        cost.record(tokens, seconds, verifies=bool(number % 2))
    return cost


@pytest.mark.parametrize(("base", "slope"), [(1.0, 0.0), (1.0, 0.05), (0.2, 0.2), (0.0, 1.0)])
def test_estimates_follow_the_steps(base: float, slope: float):
    cost = learned(base, slope)
    for tokens in (2, 8, 18):
        assert cost.estimate_plain(tokens) == pytest.approx(base + slope * tokens, rel=0.35)
        assert cost.estimate_verifying(tokens) == pytest.approx(base + slope * tokens, rel=0.35)


def test_equal_steps_leave_the_guess_and_a_machine_that_changes_is_learned_anew():
    cost = StepCost()
    for _ in range(100):
        cost.record(4, 2.0, verifies=False)
    assert cost.estimate_plain(4) == pytest.approx(2.0)
    assert 2.0 < cost.estimate_plain(8) < 4.0
    assert cost.estimate_verifying(8) == cost.estimate_plain(8)
    for number in range(300):
        tokens = 4 + 4 * (number % 2)
        cost.record(tokens, 5.0 * tokens, verifies=False)
    assert cost.estimate_plain(8) == pytest.approx(40, rel=0.1)


def test_a_draft_that_costs_as_much_as_the_model_is_turned_off_and_tried_again_now_and_then():
    cost, widths = StepCost(), []
    for _ in range(1000):
        width = 0 if cost.must_measure else choose_width(cost, [(1.0, 16)], 8)
        cost.record(1 + width, 1.0 + (2.0 + 1.2 * width if width else 0.0), verifies=bool(width))
        widths.append(width)
    assert 1 <= sum(width > 0 for width in widths[:20]) <= 10
    tried = [number for number, width in enumerate(widths) if width and not widths[number - 1]]
    assert [later - one for one, later in pairwise(tried)] == pytest.approx([33, 65, 129, 257, 513], abs=9)


def test_plain_steps_are_measured_first_and_again_among_steps_that_verify():
    cost, plain = StepCost(), []
    for number in range(200):
        plain.append(cost.must_measure)
        seconds = 0 if number % 3 else 1.0  # others also compute a prompt, which says nothing
        cost.record(1 if seconds else 0, seconds, verifies=not cost.must_measure)
    assert plain[:3] == [True, True, False]
    assert 4 <= sum(plain) <= 8


@pytest.mark.parametrize(
    ("cost", "rows", "width"),
    [
        ((1.0, 0.0), [(0.9, 16)], 8),  # a machine that waits for its weights verifies as much as it may
        ((1.0, 0.0), [(0.9, 3)], 3),
        ((0.0, 1.0), [(0.9, 16)], 0),  # one that waits for its arithmetic verifies nothing
        ((1.0, 0.01), [(0.0, 16)], 0),
        ((1.0, 0.01), [(0.9, 0)], 0),
        ((1.0, 0.1), [(1.0, 4), *[(0.0, 0)] * 30], 0),  # one row's gain is not worth the padding of thirty others
        ((1.0, 0.0), [(1.0, 4), *[(0.0, 0)] * 3], 4),
    ],
)
def test_the_width_pays(cost: tuple[float, float], rows: list[tuple[float, int]], width: int):
    assert choose_width(learned(*cost), rows, 8) == width


def test_a_lower_rate_has_a_smaller_width():
    widths = [choose_width(learned(1.0, 0.1), [(rate, 16)], 16) for rate in (0.2, 0.5, 0.8, 0.95)]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]
