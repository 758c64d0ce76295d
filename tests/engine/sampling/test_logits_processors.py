"""Biases and penalties change which tokens are sampled, and no reported logprob."""

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
def test_biases_and_penalties_change_the_logits(options: dict[str, object], expected: list[float]):
    sampling = Sampling(max_tokens=9, **options)

    processed = apply_penalties(mx.array(LOGITS), sampling, [1], mx.array([0, 0, 2]))

    np.testing.assert_allclose(np.array(processed), expected, atol=1e-6)


def test_banned_tokens_are_banned_in_their_own_row_only():
    logits = mx.array([LOGITS, LOGITS, LOGITS])

    masked = mask_banned(logits, [{0, 3}, frozenset(), {1, 99, -1}])  # 99 and -1 are not in the vocabulary

    assert masked.tolist() == [[-np.inf, -1.0, 0.5, -np.inf], LOGITS, [2.0, -np.inf, 0.5, -2.0]]
    assert mask_banned(logits, [frozenset()] * 3) is logits


def test_without_generated_tokens_nothing_is_penalized():
    sampling = Sampling(max_tokens=9, frequency_penalty=1.0, presence_penalty=1.0)

    processed = apply_penalties(mx.array(LOGITS), sampling, [1], mx.array([], dtype=mx.int32))

    assert processed.tolist() == LOGITS


def test_a_bias_changes_the_sampled_token_and_not_its_reported_logprob(engine: Engine, oracle: Oracle):
    unbiased = Sequence(token_ids=[0, 50], sampling=Sampling(max_tokens=6, temperature=0), top_logprobs=1)
    engine.add([unbiased]).result(60)
    bias = tuple((token_id, -100.0) for token_id in set(unbiased.token_ids[2:]))
    biased = Sequence(
        token_ids=[0, 50], sampling=Sampling(max_tokens=6, temperature=0, logit_bias=bias), top_logprobs=1
    )

    engine.add([biased]).result(60)

    assert not set(biased.token_ids[2:]) & set(dict(bias))
    assert_agrees(biased, oracle)


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_a_penalty_counts_the_previous_token(engine: Engine, penalty: str):
    """The penalty also counts a token that the host has not read when the next step is launched."""
    sequence = Sequence(
        token_ids=[0, 50],
        sampling=Sampling(max_tokens=8, temperature=0, logit_bias=((7, 50.0),), **{penalty: 100.0}),
    )

    engine.add([sequence]).result(60)

    assert sequence.token_ids[2] == 7
    assert sequence.token_ids[2:].count(7) == 1
