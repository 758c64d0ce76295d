"""Biases and penalties move what is sampled, and no logprob that is reported."""

import mlx.core as mx
import numpy as np
import pytest

from scorepool.engine import Engine, Sampling, Sequence
from scorepool.engine.sampling.logits_processors import apply_penalties, mask_banned
from tests.engine.oracle import Oracle, assert_agrees

LOGITS = [2.0, -1.0, 0.5, -2.0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, LOGITS),
        ({"logit_bias": ((1, 4.0), (3, -1.5))}, [2.0, 3.0, 0.5, -3.5]),
        ({"presence_penalty": 0.5}, [1.5, -1.0, 0.0, -2.0]),
        ({"frequency_penalty": 0.5}, [1.0, -1.0, 0.0, -2.0]),
        ({"presence_penalty": -1.0, "frequency_penalty": 0.25}, [2.5, -1.0, 1.25, -2.0]),
        ({"repetition_penalty": 2.0}, [1.0, -2.0, 0.25, -2.0]),
    ],
)
def test_logits_are_moved_as_asked(options: dict[str, object], expected: list[float]):
    sampling = Sampling(max_tokens=9, **options)

    moved = apply_penalties(mx.array(LOGITS), sampling, [1], mx.array([0, 0, 2]))

    np.testing.assert_allclose(np.array(moved), expected, atol=1e-6)


def test_barred_tokens_are_those_of_their_own_row():
    logits = mx.array([LOGITS, LOGITS, LOGITS])

    barred = mask_banned(
        logits, [{0, 3}, frozenset(), {1, 99}]
    )  # a configuration may name a token that the model has not

    assert barred.tolist() == [[-np.inf, -1.0, 0.5, -np.inf], LOGITS, [2.0, -np.inf, 0.5, -2.0]]
    assert mask_banned(logits, [frozenset()] * 3) is logits


def test_nothing_generated_is_nothing_penalized():
    sampling = Sampling(max_tokens=9, frequency_penalty=1.0, presence_penalty=1.0)

    moved = apply_penalties(mx.array(LOGITS), sampling, [1], mx.array([], dtype=mx.int32))

    assert moved.tolist() == LOGITS


def test_a_biased_token_is_sampled_and_its_own_logprob_reported(engine: Engine, oracle: Oracle):
    banned = Sequence(token_ids=[0, 50], sampling=Sampling(max_tokens=6, temperature=0), top_logprobs=1)
    engine.add([banned]).result(60)
    bias = tuple((token_id, -100.0) for token_id in set(banned.token_ids[2:]))
    row = Sequence(token_ids=[0, 50], sampling=Sampling(max_tokens=6, temperature=0, logit_bias=bias), top_logprobs=1)

    engine.add([row]).result(60)

    assert not set(row.token_ids[2:]) & set(dict(bias))
    assert_agrees(row, oracle)


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_a_penalty_counts_the_token_before(engine: Engine, penalty: str):
    """The one that was sampled while this step was launched, too."""
    row = Sequence(
        token_ids=[0, 50],
        sampling=Sampling(max_tokens=8, temperature=0, logit_bias=((7, 50.0),), **{penalty: 100.0}),
    )

    engine.add([row]).result(60)

    assert row.token_ids[2] == 7
    assert row.token_ids[2:].count(7) == 1
