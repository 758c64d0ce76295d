"""Sampling agrees with float64 numpy, and a row's tokens depend only on its seed."""

from random import Random

import mlx.core as mx
import numpy as np
import pytest

from scorepool.engine import Sampling
from scorepool.engine.sampling.sample import filter_logits, noise_key, sample
from tests.engine.oracle import filter_as_transformers

RANDOM = np.random.default_rng(0)
VOCAB_SIZE = 50
LOGITS = RANDOM.normal(0, 2, VOCAB_SIZE).astype(np.float32)


def draw(sampling: Sampling, count: int, logits: np.ndarray = LOGITS) -> tuple[np.ndarray, np.ndarray]:
    rows = mx.array(np.broadcast_to(logits, (count, len(logits))))
    token_ids, logprobs, _ = sample(rows, [sampling] * count, [noise_key(1, index) for index in range(count)])
    return np.array(token_ids), np.array(logprobs)


def expected_logprobs(sampling: Sampling) -> np.ndarray:
    """Compute log p of every token under the sampling distribution; -inf if excluded."""
    scaled = LOGITS.astype(np.float64) / sampling.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    rank_of = np.argsort(order)
    if sampling.top_k:
        p = np.where(rank_of < sampling.top_k, p, 0)
        p /= p.sum()
    before = np.concatenate([[0], np.cumsum(p[order])[:-1]])[rank_of]
    p = np.where((before < sampling.top_p) & (p >= sampling.min_p * p.max()), p, 0)
    with np.errstate(divide="ignore"):
        return np.log(p / p.sum())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 1},
        {"top_k": 1_000_000},
        {"top_p": 1e-300},
    ],
)
def test_tokens_follow_the_filtered_distribution_and_report_its_logprobs(options: dict[str, float]):
    sampling = Sampling(max_tokens=1, **options)
    expected = expected_logprobs(sampling)

    token_ids, logprobs = draw(sampling, 4000)

    np.testing.assert_allclose(logprobs, expected[token_ids], atol=1e-5)
    frequency = np.bincount(token_ids, minlength=VOCAB_SIZE) / 4000
    assert np.abs(frequency - np.exp(expected)).max() < 0.04


def draw_sampling(random: Random) -> Sampling:
    return Sampling(
        max_tokens=1,
        temperature=random.choice([0.1, 0.7, 1.0, 1.3, 5.0]),
        top_k=random.choice([0, 1, 2, 5, 20, 49, 100]),
        top_p=random.choice([0.01, 0.3, 0.7, 0.9, 0.99, 1.0]),
        min_p=random.choice([0.0, 0.0, 0.01, 0.2, 1.0]),
    )


def test_the_filtered_distribution_equals_that_of_transformers():
    random, num_kept = Random(0), []
    samplings = [draw_sampling(random) for _ in range(500)]
    rows = np.stack([RANDOM.normal(0, random.choice([0.1, 1, 4]), VOCAB_SIZE) for _ in samplings]).astype(np.float32)

    filtered = np.array(filter_logits(mx.array(rows), samplings))
    token_ids, logprobs, _ = map(np.array, sample(mx.array(rows), samplings, list(range(len(samplings)))))

    for row, sampling, token_id, logprob, found in zip(rows, samplings, token_ids, logprobs, filtered, strict=True):
        right = filter_as_transformers(row, sampling)
        assert np.array_equal(np.isinf(found), np.isinf(right)), sampling
        assert logprob == pytest.approx(right[token_id], abs=1e-5)
        num_kept.append(np.isfinite(right).sum())
    assert len(set(num_kept)) > 25


def test_greedy_takes_the_most_likely_token_and_breaks_ties_by_id():
    logits = np.array([1, 3, 3, 2], np.float32)

    token_ids, logprobs = draw(Sampling(max_tokens=1, temperature=0, top_p=0.1), 3, logits)

    assert token_ids.tolist() == [1, 1, 1]
    assert logprobs.tolist() == [0, 0, 0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e30])
def test_no_temperature_overflows(temperature: float):
    token_ids, logprobs = draw(Sampling(max_tokens=1, temperature=temperature), 20)

    assert np.isfinite(logprobs).all()
    assert temperature > 1 or set(token_ids.tolist()) == {int(LOGITS.argmax())}


def test_a_row_samples_the_same_alone_and_in_a_batch():
    samplings = [Sampling(max_tokens=1, temperature=0.1 + row) for row in range(5)]
    keys = [noise_key(row, 3) for row in range(5)]
    rows = mx.array(RANDOM.normal(0, 1, (5, VOCAB_SIZE)).astype(np.float32))

    together, *_ = sample(rows, samplings, keys)
    alone = [sample(rows[row : row + 1], samplings[row : row + 1], keys[row : row + 1])[0].item() for row in range(5)]

    assert together.tolist() == alone


def test_noise_differs_by_seed_and_by_index():
    assert len({noise_key(seed, index) for seed in range(20) for index in range(20)}) == 400
    assert 0 <= noise_key(2**64 - 1, 0) < 2**64
