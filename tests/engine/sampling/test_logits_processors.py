"""Biases, penalties and bad words change which tokens are sampled, and no reported logprob."""

import mlx.core as mx
import numpy as np
import pytest
import torch
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from scorepool.engine import Engine, Sampling, Sequence
from scorepool.engine.sampling.logits_processors import apply_penalties, mask_bad_words, mask_banned
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


@pytest.mark.parametrize("is_read", [True, False], ids=["all read", "last one unread"])
@pytest.mark.parametrize("generated", [[4], [2, 4], [1, 2, 4], [4, 2], [2, 4, 2, 4], [3, 3, 3]])
def test_bad_words_are_masked_as_transformers_masks_them(generated: list[int], is_read: bool):
    words = [(0,), (4, 1), (2, 4, 2), (1, 2, 4, 3), (3, 3, 3, 3), (2, 4), (5, 4, 1)]
    logits = np.linspace(-2, 2, 6, dtype=np.float32)
    expected = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=[99])(
        torch.tensor([generated]), torch.from_numpy(logits[None])
    )

    read, last_id = (generated, None) if is_read else (generated[:-1], mx.array(generated[-1:]))
    masked = mask_bad_words(mx.array(logits), words, read, last_id)

    np.testing.assert_array_equal(np.array(masked), expected[0].numpy())


@pytest.mark.parametrize("unread", [False, True])
def test_the_first_token_can_be_a_bad_word_of_one_token_only(unread: bool):
    read, last_id = ([], mx.array([3])) if unread else ([], None)

    masked = mask_bad_words(mx.array(LOGITS), [(1,), (0, 2)], read, last_id)

    assert masked.tolist() == [2.0, -np.inf, 0.5, -2.0]
