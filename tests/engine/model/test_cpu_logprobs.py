"""What the host computes of logits is what MLX computes, and float64."""

from collections.abc import Callable
from math import isfinite
from random import Random

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorepool.engine import Engine, Sampling, Sequence
from scorepool.engine.model import cpu_logprobs
from scorepool.engine.sampling import logprobs, scoring
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_tokenizer import BOS


def difference(one: mx.array, other: mx.array) -> float:
    largest: float = mx.abs(one - other).max().item()  # type: ignore[assignment]
    return largest


def test_normalizers_and_logprobs_are_those_of_mlx_and_of_float64():
    logits = mx.random.normal((70, 5003))
    logits[3, 10:] = -mx.inf
    token_ids = mx.array([number * 7 % 10 for number in range(70)])

    normalizers, logprobs = cpu_logprobs.normalize(logits, token_ids)

    expected = scoring.log_normalizer(logits)
    assert difference(mx.array(normalizers), expected) < 2e-6  # two steps of float32 at 9
    assert difference(mx.array(logprobs), scoring.logprobs(logits, expected, token_ids)) < 2e-6
    exact = np.array(logits).astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert np.abs(exact[np.arange(70), np.array(token_ids)] - logprobs).max() < 2e-6


@pytest.mark.parametrize("value", [mx.nan, mx.inf])
def test_rows_without_a_distribution_have_no_normalizer(value: float):
    logits = mx.random.normal((3, 50))
    logits[1, 7] = value
    logits[2] = -mx.inf

    normalizers, _ = cpu_logprobs.normalize(logits, mx.array([1, 2, 3]))

    assert [isfinite(normalizer) for normalizer in normalizers] == [True, False, False]


@pytest.mark.parametrize(("vocab_size", "k"), [(5003, 20), (5003, 1), (300, 20), (70, 64), (20, 20), (151_936, 5)])
@pytest.mark.parametrize("rows", [None, [1, 2, 3, 4], [1, 0]])
def test_the_most_likely_tokens_are_those_of_mlx(vocab_size: int, k: int, rows: list[int] | None):
    logits = mx.random.normal((5, vocab_size)) * 4
    logits[2] = mx.round(logits[2])  # ties
    logits[3, 5:] = mx.minimum(logits[3, 5:], 0)  # half of the row is equal
    logits[4, 10:] = -mx.inf
    normalizers, _ = cpu_logprobs.normalize(logits, mx.zeros((5,), dtype=mx.int32))

    ids, logprobs = cpu_logprobs.top_k(logits, normalizers, rows, k)

    asked = logits if rows is None else logits[mx.array(rows)]
    normalizer = mx.array(normalizers)[mx.array(rows or [*range(5)])]
    expected = scoring.top_k(asked, k)
    expected, values = scoring.by_logprob(expected, scoring.logprobs_of_many(asked, normalizer, expected))
    assert [list(row) for row in ids] == expected.tolist()
    assert [list(row) for row in logprobs] == values.tolist()


@pytest.mark.parametrize("num_rows", [1, 4, 5])
def test_rows_without_a_distribution_have_as_many_entries(num_rows: int):
    logits = mx.random.normal((num_rows, 300))
    logits[0, 7], logits[0, 8] = mx.nan, mx.inf
    normalizers, _ = cpu_logprobs.normalize(logits, mx.zeros((num_rows,), dtype=mx.int32))
    ids, logprobs = cpu_logprobs.top_k(logits, normalizers, None, 20)
    assert [len(row) for row in ids] == [len(row) for row in logprobs] == [20] * num_rows


@pytest.mark.parametrize("num_rows", [1, 5])
def test_the_logprob_of_the_only_token_is_zero_and_has_no_sign(num_rows: int):
    logits = mx.full((num_rows, 300), -mx.inf)
    logits[:, 7] = 3.0
    normalizers, _ = cpu_logprobs.normalize(logits, mx.full((num_rows,), 7))
    _, logprobs = cpu_logprobs.top_k(logits, normalizers, None, 1)
    assert [str(row[0]) for row in logprobs] == ["0.0"] * num_rows


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, 1.0000001, -2.0, -np.inf]), min_size=9, max_size=9), min_size=1))
def test_ties_are_broken_by_id(rows: list[list[float]]):
    logits = mx.array(rows)
    normalizers, _ = cpu_logprobs.normalize(logits, mx.zeros((len(rows),), dtype=mx.int32))
    ids, _ = cpu_logprobs.top_k(logits, normalizers, None, 4)
    for row, normalizer, found in zip(np.array(rows, np.float32), normalizers, ids, strict=True):
        if isfinite(normalizer):
            chosen = sorted(range(9), key=lambda token_id: (-row[token_id], token_id))[:4]
            logprobs = row - np.float32(normalizer)
            assert list(found) == sorted(chosen, key=lambda token_id: (-logprobs[token_id], token_id))


@pytest.mark.parametrize("value", [mx.nan, mx.inf])
def test_rows_without_a_distribution_change_no_other(value: float):
    logits = mx.random.normal((4, 500))
    alone = cpu_logprobs.top_k(logits[:1], cpu_logprobs.normalize(logits[:1], mx.array([0]))[0], None, 7)
    logits[1, 7] = value
    logits[2] = -mx.inf
    logits[3] = value
    normalizers, _ = cpu_logprobs.normalize(logits, mx.array([1, 2, 3, 4]))

    ids, logprobs = cpu_logprobs.top_k(logits, normalizers, None, 7)

    assert (ids[0], logprobs[0]) == (alone[0][0], alone[1][0])
    assert [len(row) for row in ids] == [7] * 4


@pytest.mark.parametrize("min_normalized", [0, 10**12])
def test_rows_that_ask_for_different_numbers_of_tokens_share_a_batch(
    min_normalized: int,
    engine_of: Callable[..., Engine],
    oracle_of: Callable[[str], Oracle],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(logprobs, "MIN_NORMALIZED", min_normalized)
    draw = Random(0)
    rows = [
        Sequence(
            token_ids=[BOS, *(draw.randrange(3, VOCAB_SIZE) for _ in range(20 + 9 * number))],
            score_from=number if number % 2 or number % 3 == 1 else None,
            sampling=None if number % 3 == 1 else Sampling(max_tokens=7, temperature=0.7, seed=number),
            temperature=1.0 if number % 3 == 1 else 0.7,
            top_logprobs=k,
        )
        for number, k in enumerate([0, 5, 20, 5, 1] * 2)
    ]
    engine_of("llama").add(rows).result(60)
    for row in rows:
        assert_agrees(row, oracle_of("llama"))
