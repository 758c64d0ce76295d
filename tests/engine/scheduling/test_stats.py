"""The engine counts its work: tokens by kind, sequences, and how full its steps are."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scorepool.engine import Engine, EngineStats, Sampling, Sequence
from tests.engine.test_late_constraints import LateConstraint


@pytest.fixture
def engine(open_engine: Callable[..., Engine], folder_of: Callable[[str], Path]) -> Engine:
    return open_engine(folder_of("llama"), max_batch_tokens=64, max_running_rows=4)


def counts(stats: EngineStats) -> tuple[int, int, int, int]:
    return stats.prompt_tokens, stats.cached_tokens, stats.scored_tokens, stats.generated_tokens


def test_tokens_are_counted_by_kind(engine: Engine):
    assert engine.stats == EngineStats()
    engine.add([Sequence(token_ids=[*range(1, 21)], score_from=15)]).result(60)
    assert counts(engine.stats) == (19, 0, 5, 0)  # a score needs no logits of the last token
    engine.add([Sequence(token_ids=[*range(30, 40)], sampling=Sampling(max_tokens=7, ignore_eos=True))]).result(60)
    assert counts(engine.stats) == (29, 0, 5, 7)
    both = Sequence(token_ids=[*range(60, 70)], score_from=4, sampling=Sampling(max_tokens=3, ignore_eos=True))
    engine.add([both]).result(60)
    assert counts(engine.stats) == (39, 0, 5 + 6, 7 + 3)
    assert engine.stats.steps >= 11
    assert engine.stats.busy_s > 0


def test_a_token_whose_constraint_is_late_is_counted_when_it_is_sampled(engine: Engine):
    late = Sequence(
        token_ids=[*range(1, 21)],
        score_from=15,
        sampling=Sampling(max_tokens=12, ignore_eos=True),
        constraint=LateConstraint(7, 6),
    )
    engine.add([late]).result(60)
    assert late.num_pauses > 0
    assert counts(engine.stats) == (20, 0, 5, 12)


def test_a_shared_prefix_is_computed_once_and_counted_as_cached(engine: Engine):
    prefix = [*range(1, 49)]
    engine.add([Sequence(token_ids=[*prefix, 50 + i, 60], score_from=49) for i in range(4)]).result(60)
    prompt, cached, scored, _ = counts(engine.stats)
    assert prompt + cached == 4 * 49 + 48  # the prefix went through the model once more, by itself
    assert cached == 4 * 48
    assert scored == 4
    assert engine.stats.rows == 4  # the prefix is no sequence of a caller's


def test_a_step_is_full_at_either_limit(engine: Engine):
    rows = [Sequence(token_ids=[i, 2], sampling=Sampling(max_tokens=30, ignore_eos=True)) for i in range(1, 5)]
    engine.add(rows).result(60)
    stats = engine.stats
    assert stats.fill / stats.steps == pytest.approx(1.0, abs=0.1)  # 4 of 4 sequences, all but the first step
    assert stats.rows / stats.steps == pytest.approx(4.0)
    engine.add([Sequence(token_ids=[1, 2], sampling=Sampling(max_tokens=30, ignore_eos=True))]).result(60)
    assert (engine.stats.fill - stats.fill) / (engine.stats.steps - stats.steps) == pytest.approx(0.25, abs=0.05)
