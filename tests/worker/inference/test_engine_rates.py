"""A worker shows what its engine computed lately, not since its start."""

import pytest

from scorepool.engine import EngineStats
from scorepool.worker.inference import engine_rates
from scorepool.worker.inference.engine_rates import LongestStep, RateWindow


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(engine_rates, "awake_s", lambda: now[0])
    return now


def test_rates_are_those_of_the_last_seconds(clock: list[float]):
    window = RateWindow()
    assert window.rates(EngineStats(prompt_tokens=10**6)) is None
    for at in range(4, 61, 4):  # 100 tokens/s until 40, then none
        clock[0] = 100.0 + at
        busy = EngineStats(
            steps=10 * min(at, 40),
            busy_s=0.5 * min(at, 40),
            prompt_tokens=10**6 + 100 * min(at, 40),
            generated_tokens=min(at, 40),
            rows=40 * min(at, 40),
            fill=2.5 * min(at, 40),
            proposed_tokens=8 * min(at, 40),
            accepted_tokens=6 * min(at, 40),
        )
        rates = window.rates(busy)
        assert rates is not None
        if at == 36:
            assert (rates.prompt_tokens_per_s, rates.generated_tokens_per_s, rates.steps_per_s) == (100, 1, 10)
            assert (rates.busy, rates.step_s, rates.rows_per_step, rates.batch_fill) == (0.5, 0.05, 4, 0.25)
            assert rates.acceptance == 0.75
    assert (rates.prompt_tokens_per_s, rates.steps_per_s, rates.busy) == (0, 0, 0)
    assert (rates.step_s, rates.rows_per_step, rates.batch_fill, rates.acceptance) == (None, None, None, None)
    assert len(window._reads) <= 6


def test_the_longest_step_is_forgotten_with_the_steps_after_it():
    longest = LongestStep()
    assert longest.read(EngineStats()) == 0
    assert longest.read(EngineStats(steps=2, busy_s=4.0)) == 2
    assert longest.read(EngineStats(steps=2, busy_s=4.0)) == 2  # no step has ended since
    assert longest.read(EngineStats(steps=2, busy_s=4.0), running_s=3.0) == 3
    assert longest.read(EngineStats(steps=3, busy_s=4.1)) == pytest.approx(1.6)
    assert longest.read(EngineStats(steps=43, busy_s=8.1)) == pytest.approx(0.1)
