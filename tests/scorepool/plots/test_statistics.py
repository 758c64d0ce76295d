"""The figures that plots show are those that numpy computes."""

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scorepool.files import BadInput
from scorepool.plots import plot_file
from scorepool.plots.labels import caption, number_text, show_token
from scorepool.plots.sketch import Sketch
from scorepool.plots.statistics import MAX_POINTS, Calibration, Comparison, Histogram, TokenSeries, kind_of

RANDOM = np.random.default_rng(0)
UGLY = [None, math.inf, -math.inf, math.nan, "", "x", True, [1.0]]


def histogram_of(values: Any, column: str = "perplexity") -> Histogram:
    return Histogram.of(({column: value} for value in values), None if column == "perplexity" else column)


@pytest.mark.parametrize(
    "values",
    [RANDOM.lognormal(3, 1, 5000), RANDOM.normal(0, 1, 5000), RANDOM.normal(10, 0.5, 5000), np.full(300, 7.25),
     np.array([12.5]), np.array([1.0, 1e9] * 50), np.zeros(9)],
    ids=["lognormal", "signed", "narrow", "equal", "one", "huge", "zeros"],
)  # fmt: skip
def test_a_histogram_counts_as_numpy_does(values: Any):
    found = histogram_of(values, "x")
    edges = found.edges()
    [sketch] = found.series.values()
    counts = np.array(sketch.histogram(edges))
    assert counts.sum() == len(values)
    assert np.abs(np.cumsum(counts) - np.cumsum(np.histogram(values, edges)[0])).max() <= max(2, len(values) * 2e-3)
    for fraction in (0.0, 0.25, 0.5, 0.9, 1.0):
        expected = np.quantile(values, fraction, method="lower")
        assert sketch.quantile(fraction) == pytest.approx(expected, rel=1e-4, abs=1e-12)
    assert (found.minimum, found.maximum) == (values.min(), values.max())


def test_values_that_are_no_finite_numbers_are_counted_apart():
    found = histogram_of([*UGLY, 1.0, "2.5"])
    assert found.num_missing == len(UGLY)
    assert [sketch.number for sketch in found.series.values()] == [2]
    assert caption(found, "demo") == f"demo; 2 rows, 1 to 2.5; {len(UGLY)} without a finite value"
    with pytest.raises(BadInput, match="no row has a finite 'perplexity'"):
        histogram_of(UGLY)


def test_a_histogram_has_a_series_per_model():
    rows = [{"a_perplexity": 1.0, "b_perplexity": 3.0}]
    assert list(Histogram.of(rows, None).series) == ["a", "b"]


def test_the_memory_of_a_histogram_is_bounded():
    sketch = Sketch()
    values = np.exp(RANDOM.normal(3, 0.01, 200_000)).tolist()
    tracemalloc.start()
    for value in values:
        sketch.add(value)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500_000


def test_calibration_is_that_of_its_definition():
    probabilities = RANDOM.dirichlet([0.5] * 4, 3000)
    confidence = probabilities.max(1)
    correct = RANDOM.random(3000) < confidence * 0.8
    rows = [
        {"choice_probability": row.tolist(), "acc": float(right)}
        for row, right in zip(probabilities, correct, strict=True)
    ]
    bad: list[Any] = [None, [], ["x", 0.5], [None, 0.5], [[1]], [2.0, -1.0], "0.5", {"a": 1}]
    found = Calibration.of([*rows, *({"choice_probability": each, "acc": 1.0} for each in bad)])
    index = np.minimum((confidence * 10).astype(int), 9)
    gaps = [
        np.sum(index == each) / 3000 * abs(correct[index == each].mean() - confidence[index == each].mean())
        for each in set(index)
    ]
    assert found.expected_error == pytest.approx(sum(gaps))
    assert found.counts == np.bincount(index, minlength=10).tolist()
    assert found.accuracy == pytest.approx(correct.mean())
    assert found.confidence == pytest.approx(confidence.mean())
    low, high = found.interval(9)
    assert 0 < low < correct[index == 9].mean() < high < 1


def test_calibration_reads_the_lists_of_a_csv_and_names_what_is_missing():
    assert Calibration.of([{"choice_probability": "[0.25,0.75]", "acc": "1.0"}]).counts[7] == 1
    with pytest.raises(BadInput, match="no column 'acc': score the rows with --choices and --answer"):
        Calibration.of([{"choice_probability": [1.0]}])


def test_a_comparison_counts_all_rows_and_draws_a_sample():
    number = MAX_POINTS + 5000
    pairs = np.stack([RANDOM.normal(1, 0.2, number), RANDOM.normal(1.05, 0.2, number)], 1)
    rows = ({"a_bits_per_byte": first, "b_bits_per_byte": second} for first, second in pairs.tolist())
    found = Comparison.of(rows, None, None)
    difference = pairs[:, 1] - pairs[:, 0]
    assert (found.models, found.number, len(found.points)) == (("a", "b"), number, MAX_POINTS)
    assert found.mean_difference == pytest.approx(difference.mean())
    assert found.standard_error == pytest.approx(difference.std(ddof=1) / math.sqrt(number))
    assert found.num_lower == np.sum(difference < 0)
    assert np.mean(found.points, 0) == pytest.approx(pairs.mean(0), abs=0.01)
    assert np.isin([first for first, _ in found.points[-100:]], pairs[:, 0]).all()


def test_the_models_of_a_comparison_can_be_chosen():
    rows = [{"a_bits_per_byte": 1, "b_bits_per_byte": 2, "c_bits_per_byte": 3, "c_logprob_per_token": 1}]
    assert Comparison.of(rows, None, ["c", "b"]).points == [(3.0, 2.0)]
    with pytest.raises(BadInput, match=r"the models are a, d: expected two of those that .*: a, b, c"):
        Comparison.of(rows, None, ["a", "d"])


def test_tokens_are_those_of_the_row():
    rows = [{"tokens": ["a"], "logprobs": [-1.0]}, {"tokens": ["b", "c"], "logprobs": [None, -2.0]}, {"tokens": None}]
    found = TokenSeries.of(rows, 2)
    assert (found.tokens, found.logprobs, found.perplexity) == (["b", "c"], [None, -2.0], math.exp(2))
    with pytest.raises(BadInput, match="there is no row 4"):
        TokenSeries.of(rows, 4)
    with pytest.raises(BadInput, match=r"row 3 has no tokens with logprobs: .* --tokens"):
        TokenSeries.of(rows, 3)


def test_the_kind_follows_from_the_columns():
    assert kind_of({"perplexity": 1.0, "bits_per_byte": 2.0}) == "histogram"
    assert kind_of({"x_choice_probability": [], "acc": 1.0}) == "calibration"
    assert kind_of({"a_bits_per_byte": 1.0, "b_bits_per_byte": 1.0, "b_bits_per_byte_difference": 0.0}) == "comparison"


def test_numbers_and_tokens_as_labels():
    texts = [number_text(value) for value in (1, 12345, 0.0, 1.2345, 1234.5, 1e9, 2.5e-5)]
    assert texts == ["1", "12,345", "0", "1.23", "1,234", "1e9", "2.5e-5"]
    assert show_token(" a\n\u200b\x00", 10) == "\u00b7a\u21b5U+200BU+0000"
    assert show_token("abcdef", 4) == "abc\u2026"


@pytest.mark.parametrize(
    ("targets", "kind", "message"),
    [(["x.pdf"], None, "no known format: expected PATH.png, PATH.svg or `-`"),
     (["nowhere/x.png"], None, "there is no folder"),
     (["-"], "calibration", "no column 'choice_probability'"),
     (["-"], "pie", "the kind is 'pie'")],
)  # fmt: skip
def test_what_cannot_be_drawn_is_one_sentence(
    targets: list[str], kind: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(json.dumps({"perplexity": 2.0}))
    with pytest.raises(BadInput, match=message):
        plot_file("in.jsonl", targets, kind=kind)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
