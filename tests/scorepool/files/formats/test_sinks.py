"""What the formats of OUT cannot hold is named, and nothing is changed on the way."""

import json
from pathlib import Path
from typing import Any

import pandas
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorepool.files.errors import BadInput
from scorepool.files.formats.arrow_files import ArrowSink
from scorepool.files.formats.sinks import CsvSink, JsonlSink


def parquet_sink() -> ArrowSink:
    return ArrowSink(None, (), is_parquet=True)


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (1, 1.5),
        (1, 2**64),
        ({"role": "user"}, {"role": "user", "name": "Ann"}),
        ([{"role": "user"}], [{"role": "user", "name": "Ann"}]),
        ([], [1]),
        ([1], [0.5]),
        ("a", 1),
    ],
)
def test_a_value_that_a_column_cannot_hold_is_a_bad_row(first: Any, later: Any):
    sink = parquet_sink()
    sink.encode([{"x": first}])
    encoded, reasons = sink.encode([{"x": later}, {"x": first}])
    assert list(reasons) == [0]
    assert "does not fit the types of the first rows" in reasons[0]
    assert encoded


@pytest.mark.parametrize(
    "values",
    [
        [1, None],
        [1.5, 2.0, float("nan")],
        [[], ["a"]],
        [{"a": None}, {"a": "b"}, {}],
        [[{"role": "user"}, {"role": "user", "name": "Ann"}]],
        ["a\rb", "", None],
        [True, False],
    ],
)
def test_values_come_back_as_they_were(values: list[Any], tmp_path: Path):
    sink, partial = parquet_sink(), tmp_path / "partial"
    rows = [{"x": value} for value in values]
    encoded = [sink.encode([*rows]), *(sink.encode([row]) for row in rows)]
    assert [reasons for _, reasons in encoded] == [{}] * len(encoded)
    partial.write_bytes(b"".join(message for message, _ in encoded) + sink.end())
    sink.make_file(partial, tmp_path / "out.parquet")

    def without_nulls(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_nulls(each) for key, each in value.items() if each is not None}
        return list(map(without_nulls, value)) if isinstance(value, list) else value

    written = pq.read_table(tmp_path / "out.parquet")["x"].to_pylist()
    assert str(without_nulls(written)) == str(without_nulls(values * 2))  # NaN is not equal to itself


@pytest.mark.parametrize("value", [{}, [{"a": {}}], 2**64, -(2**63) - 1])
def test_a_column_that_parquet_cannot_hold_is_named_before_rows_are_computed(value: Any):
    with pytest.raises(BadInput, match=r"column 'x' does not fit .*give OUT as \.jsonl"):
        parquet_sink().encode([{"x": value}])


@pytest.mark.parametrize("text", ["a\rb", "\r", "a\r\nb", "a\nb", '"', "a,b", ""])
def test_every_text_is_one_field_of_a_csv(text: str, tmp_path: Path):
    encoded, _ = CsvSink().encode([{"id": 1, "text": text}, {"id": 2, "text": "b"}])
    path = tmp_path / "out.csv"
    path.write_bytes(encoded)
    found = pandas.read_csv(path, keep_default_na=False)
    assert [*found["id"], *found["text"]] == [1, 2, text, "b"]


@given(st.text())
def test_every_row_of_jsonl_is_one_line_for_every_reader(text: str):
    encoded, _ = JsonlSink().encode([{"x": text}, {"x": 1}])
    first, second = encoded.decode().splitlines()
    assert (json.loads(first), json.loads(second)) == ({"x": text}, {"x": 1})
