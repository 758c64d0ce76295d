"""The divergence of many tokens is summarised as numpy does, and comparisons of several jobs join as one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from scorepool import wire

BASE = wire.Provenance(
    model="base",
    fingerprint="f",
    dtype="float32",
    quantization=None,
    adapter=None,
    mode="exact",
    backend="cpu",
    versions={},
)
TOKENS = st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.booleans(), st.floats(-1, 1)), min_size=1)


def compared(tokens: list[tuple[float, float, bool, float]]) -> wire.ModelComparison:
    """Return the comparison of one sequence with these tokens: both bounds, the same top token, p(model) - p(base)."""
    lower, upper, same, deltas = (list(column) for column in zip(*tokens, strict=True))
    return wire.ModelComparison(
        base=BASE,
        base_job_id="j",
        num_tokens=len(tokens),
        num_top=4,
        is_exact=False,
        kld_lower=wire.divergence(lower),
        kld_upper=wire.divergence(upper),
        same_top_p=sum(same) / len(same),
        mean_delta_p=float(np.mean(deltas)),
        rms_delta_p=math.sqrt(np.mean(np.square(deltas))),
        logprob_sum_difference=math.fsum(deltas),
        sequences=[
            wire.ComparedSequence(
                base_logprobs=wire.Floats(deltas),
                kld_lower=wire.Floats(lower),
                kld_upper=wire.Floats(upper),
                same_top=same,
            )
        ],
    )


@given(values=st.lists(st.floats(0, 100), min_size=1, max_size=200))
def test_quantiles_are_those_of_numpy(values: list[float]):
    found = wire.divergence(values)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
    assert found.median == pytest.approx(np.quantile(values, 0.5), abs=1e-9)
    assert found.p99 == pytest.approx(np.quantile(values, 0.99), abs=1e-9)
    assert found.max == max(values)


@given(parts=st.lists(TOKENS, min_size=1, max_size=4))
def test_joined_comparisons_are_those_of_all_tokens_together(parts: list[list[tuple[float, float, bool, float]]]):
    joined = wire.join_comparisons([compared(part) for part in parts])
    whole = compared([token for part in parts for token in part])
    for name in ("same_top_p", "mean_delta_p", "rms_delta_p", "logprob_sum_difference", "num_tokens"):
        assert getattr(joined, name) == pytest.approx(getattr(whole, name), abs=1e-6), name
    for name in ("kld_lower", "kld_upper"):
        for statistic in ("mean", "median", "p99", "max"):
            one, other = (getattr(getattr(each, name), statistic) for each in (joined, whole))
            assert one == pytest.approx(other, rel=1e-6, abs=1e-6)
    assert [len(sequence.same_top) for sequence in joined.sequences] == [len(part) for part in parts]


def test_a_first_token_without_a_distribution_is_left_out_of_joined_comparisons():
    part = compared([(0.5, 0.75, True, 0.0), (1.5, 1.75, False, 0.0)])
    [sequence] = part.sequences
    sequence = replace(
        sequence,
        base_logprobs=wire.Floats([None, *sequence.base_logprobs]),
        kld_lower=wire.Floats([None, *sequence.kld_lower]),
        kld_upper=wire.Floats([None, *sequence.kld_upper]),
        same_top=[None, *sequence.same_top],
    )
    joined = wire.join_comparisons([replace(part, sequences=[sequence])] * 2)
    assert (joined.kld_lower, joined.kld_upper) == (
        wire.Divergence(mean=1.0, median=1.0, p99=1.5, max=1.5),
        wire.Divergence(mean=1.25, median=1.25, p99=1.75, max=1.75),
    )
