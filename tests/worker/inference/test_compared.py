"""The divergence of two distributions has the bounds that are promised, and equals numpy's in float64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorepool.worker.inference.compared import kld_bounds

EXACT = 1e-5  # nats: logprobs are float32


def distributions(seed: int, vocab_size: int, distance: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the logprobs of a base, most likely first, and of another model, in float32."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=vocab_size) * 3
    other = logits + draw.normal(size=vocab_size) * distance
    log_p, log_q = (one - np.logaddexp.reduce(one) for one in (logits, other))
    order = np.argsort(-log_p)
    return log_p[order].astype(np.float32), log_q[order].astype(np.float32)


def kld(log_p: np.ndarray, log_q: np.ndarray) -> float:
    one, other = log_p.astype(np.float64), log_q.astype(np.float64)
    return float(np.sum(np.exp(one) * (one - other)))


@given(seed=st.integers(0, 2**32), vocab_size=st.integers(2, 300), share=st.floats(0, 1), distance=st.floats(0, 8))
def test_the_bounds_hold_the_divergence(seed: int, vocab_size: int, share: float, distance: float):
    log_p, log_q = distributions(seed, vocab_size, distance)
    num_top = max(1, int(share * vocab_size))
    lower, upper = kld_bounds(
        log_p[:num_top].tolist(), log_q[:num_top].tolist(), float(log_q.min()), num_top == vocab_size
    )
    assert lower - EXACT <= kld(log_p, log_q) <= upper + EXACT
    if num_top == vocab_size:
        assert lower == upper == pytest.approx(kld(log_p, log_q), abs=EXACT)


def test_the_lower_bound_is_reached_by_a_proportional_rest():
    log_p = np.log(np.array([0.6, 0.2, 0.1, 0.1]))
    log_q = np.log(np.array([0.4, 0.3, 0.15, 0.15]))
    lower, _ = kld_bounds(log_p[:2].tolist(), log_q[:2].tolist(), float(log_q.min()), False)
    assert lower == pytest.approx(kld(log_p, log_q), abs=1e-12)


def test_the_upper_bound_is_reached_where_the_rest_is_as_likely_as_the_last_one():
    log_p = np.log(np.array([0.4, 0.2, 0.2, 0.2]))
    log_q = np.log(np.array([0.5, 0.3, 0.1, 0.1]))
    _, upper = kld_bounds(log_p[:2].tolist(), log_q[:2].tolist(), float(log_q.min()), False)
    assert upper == pytest.approx(kld(log_p, log_q), abs=1e-12)


def test_more_tokens_give_closer_bounds():
    log_p, log_q = distributions(5, 300, 0.5)
    widths = []
    for num_top in (1, 4, 16, 64, 256, 300):
        lower, upper = kld_bounds(
            log_p[:num_top].tolist(), log_q[:num_top].tolist(), float(log_q.min()), num_top == 300
        )
        widths.append(upper - lower)
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == 0
