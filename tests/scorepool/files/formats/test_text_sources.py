"""Rows of JSONL and CSV files: what can be read is read, and the rest is named with its line."""

from io import BytesIO

import pytest

from scorepool.files.errors import BadInput
from scorepool.files.formats import lines
from scorepool.files.formats.text_sources import read_csv, read_jsonl
from scorepool.files.rows import Row


def shown(row: Row) -> tuple[int, int, object]:
    return row.number, row.line, row.values if row.values is not None else row.reason


def test_jsonl_rows_have_their_number_and_their_line():
    data = b'\xef\xbb\xbf{"a": 1}\n\n{"a": \n[1]\n{"a": "\xff"}\n{"a": 2}\r\n{"a"'
    rows = list(read_jsonl(BytesIO(data), "FILE"))
    assert [shown(row)[:2] for row in rows] == [(1, 1), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]
    assert [row.values for row in rows] == [{"a": 1}, None, None, None, {"a": 2}, None]
    reasons = [row.reason for row in rows if row.values is None]
    assert reasons[1] == "the line is not a JSON object"
    assert reasons[2] == "the line is not UTF-8 text"
    assert all(reason.startswith("the line is not valid JSON: ") for reason in (reasons[0], reasons[3]))
    assert rows[-1].position == len(data)


def test_a_number_that_no_float_holds_is_the_fault_that_is_named():
    [row] = read_jsonl(BytesIO(b'{"a": 1e999}'), "FILE")
    assert row.reason.startswith("the line is not valid JSON: Number out of range")


def test_a_row_that_is_nested_too_deep_to_be_written_is_a_fault_of_its_own():
    nested = [b'{"a": ' + b"[" * depth + b"]" * depth + b"}" for depth in (499, 500, 900)]
    rows = list(read_jsonl(BytesIO(b"\n".join([*nested, b'{"a": [' + b"[]," * 600 + b"1]}"])), "FILE"))
    too_deep = "the line is nested more than 500 deep"
    assert [row.reason for row in rows] == ["", too_deep, too_deep, ""]


def test_csv_rows_may_span_lines_and_bad_ones_are_named():
    data = b'a,b\n1,"x\ny"\n\n1\n1,\xff\n2,"cut'
    rows = [shown(row) for row in read_csv(BytesIO(data), "FILE")]
    assert rows == [
        (1, 3, {"a": "1", "b": "x\ny"}),
        (2, 5, "the row has 1 fields: expected 2, as the first line has"),
        (3, 6, "the row is not UTF-8"),
        (4, 7, "the row is not valid CSV: unexpected end of data"),
    ]


@pytest.mark.parametrize("read", [read_jsonl, read_csv])
def test_a_long_line_is_left_out_in_bounded_memory(read, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 20)
    data = b'{"a": 1}\n' + b"x" * 5_000_000 + b'\n{"a": 2}\n'
    first, long, *after = [shown(row) for row in read(BytesIO(b"h\n" * (read is read_csv) + data), "FILE")]
    assert first[2] is not None
    assert long[2] == "the line has more than 20 bytes"
    assert len(after) == 1


def test_a_json_array_is_no_file_of_json_lines():
    with pytest.raises(BadInput, match="FILE is a JSON array: expected one JSON object per line"):
        list(read_jsonl(BytesIO(b'[\n{"a": 1}\n]'), "FILE"))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("a,b\n".encode("utf-16"), "FILE is UTF-16: expected lines of UTF-8 text"),
        ("a,b\n".encode("utf-32"), "FILE is UTF-32: expected lines of UTF-8 text"),
        ("a,b\n".encode("utf-16-le"), "FILE has zero bytes, as UTF-16 has: expected lines of UTF-8 text"),
        (b"\x1f\x8b\x08", "FILE is compressed by gzip: expected lines of UTF-8 text"),
        (b"PAR1\x15", "FILE is a Parquet file: expected lines of UTF-8 text"),
        (b"a,b\r1,2\r", "the lines of FILE end with carriage returns alone: expected line feeds"),
        (b"a,b,a\n1,2,3\n", "FILE has several columns 'a': expected different names in its first line"),
        (b"a,\xff\n1,2\n", "the first line of FILE is not UTF-8: expected the names of the columns"),
    ],
)
def test_a_csv_file_that_cannot_be_read_is_refused(data: bytes, sentence: str):
    with pytest.raises(BadInput, match=sentence):
        list(read_csv(BytesIO(data), "FILE"))
