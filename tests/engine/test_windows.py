"""Chunking, order and batch neither move nor drop nor change an entry (tiny models, real engine)."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scorepool.engine import Engine, Sampling, Sequence
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_tokenizer import BOS

_draw = Random(1)
DOCUMENTS = [[BOS] + [_draw.randrange(3, VOCAB_SIZE) for _ in range(79)] for _ in range(4)]


@st.composite
def scored(draw: st.DrawFn) -> Sequence:
    token_ids = draw(st.sampled_from(DOCUMENTS))[: draw(st.integers(1, 80))]
    return Sequence(
        token_ids=token_ids,
        score_from=draw(st.integers(0, len(token_ids))),
        top_logprobs=draw(st.sampled_from([0, 0, 1, 5])),
        rank=draw(st.booleans()),
        entropy=draw(st.booleans()),
        temperature=draw(st.sampled_from([1.0, 1.0, 0.5, 3.0])),
    )


@st.composite
def generating(draw: st.DrawFn) -> Sequence:
    token_ids = draw(st.sampled_from(DOCUMENTS))[: draw(st.integers(1, 40))]
    return Sequence(
        token_ids=token_ids,
        score_from=draw(st.none() | st.integers(0, len(token_ids))),
        top_logprobs=draw(st.sampled_from([0, 2])),
        sampling=Sampling(max_tokens=draw(st.integers(1, 6)), seed=draw(st.integers(0, 2**63))),
    )


batches = {
    "sequences": st.lists(scored() | generating(), min_size=1, max_size=8),
    "budget": st.sampled_from([1, 5, 16, 33, 100, 4096]),
    "max_running_rows": st.sampled_from([1, 3, 32]),
}


def assert_right(engine: Engine, oracle: Oracle, sequences: list[Sequence]) -> None:
    for future in [engine.add([sequence]) for sequence in sequences]:
        future.result(60)
    for sequence in sequences:
        assert_agrees(sequence, oracle)


@settings(max_examples=60)
@given(**batches)
@pytest.mark.soak
def test_every_entry_is_right_in_any_batch(
    engine_of: Callable[..., Engine],
    oracle_of: Callable[[str], Oracle],
    sequences: list[Sequence],
    budget: int,
    max_running_rows: int,
):
    assert_right(
        engine_of("llama", max_batch_tokens=budget, max_running_rows=max_running_rows), oracle_of("llama"), sequences
    )


@pytest.mark.parametrize("name", ["gemma3", "granitehybrid"])
@settings(max_examples=15)
@given(**batches)
def test_every_entry_is_right_with_other_kinds_of_cache(
    engine_of: Callable[..., Engine],
    oracle_of: Callable[[str], Oracle],
    name: str,
    sequences: list[Sequence],
    budget: int,
    max_running_rows: int,
):
    assert_right(
        engine_of(name, max_batch_tokens=budget, max_running_rows=max_running_rows), oracle_of(name), sequences
    )


@pytest.mark.parametrize("budget", [1, 7, 4096])
def test_a_one_token_prompt_scores_its_first_completion_token(
    engine_of: Callable[..., Engine], oracle: Oracle, budget: int
):
    sequence = Sequence(token_ids=[BOS, 40, 41], score_from=1)

    engine_of("llama", max_batch_tokens=budget).add([sequence]).result(60)

    assert len(sequence.columns.logprobs) == 2
    assert_agrees(sequence, oracle)


def test_a_sequence_without_anything_to_predict_is_done_at_once(engine: Engine):
    first, last = (
        Sequence(token_ids=[7], score_from=0, top_logprobs=2, rank=True),
        Sequence(token_ids=[7, 8], score_from=2),
    )

    engine.add([first, last]).result(60)

    assert (first.columns.logprobs, first.columns.top_ids, first.columns.top_logprobs, first.columns.ranks) == (
        [None],
        [[]],
        [[]],
        [None],
    )
    assert last.columns.logprobs == []
