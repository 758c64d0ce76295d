"""Read the rows of JSONL and CSV files."""

import csv
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from scorepool.files.errors import BadInput
from scorepool.files.formats.lines import MAX_LINE_BYTES, Line, read_lines, too_long
from scorepool.files.rows import Row

_decode_json = msgspec.json.Decoder().decode
MAX_DEPTH = 500  # of a row. Python's stack holds about twice as many, less where the row is written


def read_jsonl(file: BinaryIO, name: str) -> Iterator[Row]:
    """Yield the rows of a file with one JSON object per line. Empty lines are no rows."""
    number = 0
    for line in read_lines(file, name):
        if line.data is not None and not line.data.strip():
            continue
        number += 1
        if line.data is None:
            yield Row(number, line.number, line.position, None, too_long())
            continue
        if number == 1 and line.data.lstrip().startswith(b"["):
            raise BadInput(f"{name} is a JSON array: expected one JSON object per line, as `jq -c '.[]' FILE` writes")
        try:
            values = _decode_json(line.data)
            reason = "" if isinstance(values, dict) else "the line is not a JSON object"
            if line.data.count(b"[") + line.data.count(b"{") > MAX_DEPTH and _is_deep(values):
                reason = f"the line is nested more than {MAX_DEPTH} deep"
        except UnicodeDecodeError:
            reason = "the line is not UTF-8 text"
        except (msgspec.DecodeError, RecursionError) as error:
            reason = f"the line is not valid JSON: {error}"
        yield Row(number, line.number, line.position, None if reason else values, reason)


def _is_deep(value: object) -> bool:
    """True if lists and objects are nested more than MAX_DEPTH deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        nested = [each for each in level if isinstance(each, dict | list)]
        level = [inner for each in nested for inner in (each.values() if isinstance(each, dict) else each)]
    return bool(nested)


class _CsvLines:
    """The lines of a CSV file as text. Bytes that are not UTF-8 become surrogates."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._lines = read_lines(file, name)
        self.last = Line(0, 0, b"")
        self.has_long_line = False

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.last = line
            self.has_long_line |= line.data is None
            yield (line.data or b"\n").decode("utf-8", "surrogateescape")


def read_csv(file: BinaryIO, name: str, delimiter: str = ",") -> Iterator[Row]:
    """Yield the rows of a CSV file, whose first line names the columns. Empty lines are no rows.

    Raises BadInput if the first line cannot be that.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    lines = _CsvLines(file, name)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header = _read_header(reader, lines, name)
    number = 0
    while True:
        lines.has_long_line = False
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            number += 1
            yield Row(number, lines.last.number, lines.last.position, None, f"the row is not valid CSV: {error}")
            continue
        if not fields and not lines.has_long_line:
            continue
        number += 1
        reason = too_long() if lines.has_long_line else _defect(fields, header)
        values = None if reason else dict(zip(header, fields, strict=True))
        yield Row(number, lines.last.number, lines.last.position, values, reason)


def _read_header(reader: Iterator[list[str]], lines: _CsvLines, name: str) -> list[str]:
    try:
        header = next(reader, [])
    except csv.Error as error:
        if b"\r" in (lines.last.data or b"").strip():
            raise BadInput(f"the lines of {name} end with carriage returns alone: expected line feeds") from None
        raise BadInput(f"the first line of {name} is not valid CSV: {error}") from None
    if not _is_utf8(header):
        raise BadInput(f"the first line of {name} is not UTF-8: expected the names of the columns")
    if doubled := [column for column, count in Counter(header).items() if count > 1]:
        raise BadInput(f"{name} has several columns {doubled[0]!r}: expected different names in its first line")
    return header


def _defect(fields: list[str], header: list[str]) -> str:
    if len(fields) != len(header):
        return f"the row has {len(fields)} fields: expected {len(header)}, as the first line has"
    return "" if _is_utf8(fields) else "the row is not UTF-8"


def _is_utf8(texts: list[str]) -> bool:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True
