"""Totals of many tokens are numpy's, and go on after they were written to disk."""

import msgspec
import numpy as np
import pytest

from scorepool.files.output.divergences import Divergences
from scorepool.files.rows import TokenComparison


def test_totals_are_those_of_numpy_also_when_they_were_kept_on_disk():
    draw = np.random.default_rng(3)
    number = 5000
    lower = draw.lognormal(-4, 3, number)
    upper, same = lower + draw.random(number), draw.random(number) < 0.9
    own, base = (-draw.gamma(1, 2, number) for _ in range(2))
    tokens = [
        TokenComparison(*each) for each in zip(*(c.tolist() for c in (lower, upper, same, own, base)), strict=True)
    ]

    totals = Divergences()
    totals.add(tokens[:2000])
    totals = msgspec.json.decode(msgspec.json.encode(totals), type=Divergences)
    totals.add(tokens[2000:])
    found = totals.summarise()

    delta = np.exp(own) - np.exp(base)
    assert found.num_tokens == number
    for one, values in ((found.kld_lower, lower), (found.kld_upper, upper)):
        assert one.mean == pytest.approx(values.mean())
        assert one.max == values.max()
        assert one.median == pytest.approx(np.quantile(values, 0.5), rel=3e-3)
        assert one.p99 == pytest.approx(np.quantile(values, 0.99, method="lower"), rel=2e-3)
    assert found.kld_stderr == pytest.approx(lower.std(ddof=1) / np.sqrt(number))
    assert found.same_top_p == pytest.approx(same.mean())
    assert found.mean_delta_p == pytest.approx(delta.mean())
    assert found.rms_delta_p == pytest.approx(np.sqrt(np.mean(delta**2)))
    assert found.perplexity == pytest.approx(np.exp(-own.mean()))
    assert found.base_perplexity == pytest.approx(np.exp(-base.mean()))
    assert len(msgspec.json.encode(totals)) < 300_000


def test_a_divergence_that_rounding_made_negative_counts_as_none():
    totals = Divergences()
    totals.add([TokenComparison(-1e-8, -1e-8, True, -1.0, -1.0)])
    assert totals.summarise().kld_lower.median == pytest.approx(0, abs=1e-7)
