"""Encode rows as bytes that are appended to a file, and make the file that the user gets of them.

To add a format: a class here or in a module of its own, and its name in registry.py.
"""

import csv
import os
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Protocol

import msgspec

from scorepool import wire
from scorepool.files.rows import Values


class Sink(Protocol):
    """An encoding of rows."""

    def restore(self, partial: Path) -> None:
        """Go on after the rows that a file of this encoding holds. Raises ValueError if it is damaged."""

    def encode(self, rows: Sequence[Values]) -> tuple[bytes, dict[int, str]]:
        """Return the bytes of rows, and the reasons why some of them have none, by index."""

    def end(self) -> bytes:
        """Return the bytes that end the encoding where no file is made of it, as on stdout."""

    def make_file(self, partial: Path, out: Path) -> None:
        """Make the file that the user gets, in one step. The partial file may be gone after it. Raises OSError."""


class JsonlSink:
    """One JSON object per line."""

    def restore(self, partial: Path) -> None:
        pass

    def encode(self, rows: Sequence[Values]) -> tuple[bytes, dict[int, str]]:
        lines = (wire.on_one_line(msgspec.json.encode(row, enc_hook=to_text)) for row in rows)
        return b"".join(line + b"\n" for line in lines), {}

    def end(self) -> bytes:
        return b""

    def make_file(self, partial: Path, out: Path) -> None:
        os.replace(partial, out)


class CollectingSink:
    """A list in memory, for rows that no file gets."""

    def __init__(self, collected: list[Values]) -> None:
        self._collected = collected

    def restore(self, partial: Path) -> None:
        pass

    def encode(self, rows: Sequence[Values]) -> tuple[bytes, dict[int, str]]:
        self._collected.extend(rows)
        return b"", {}

    def end(self) -> bytes:
        return b""

    def make_file(self, partial: Path, out: Path) -> None:
        pass


class CsvSink:
    """A line of columns, those of the first rows, and a line per row. Lists and objects are written as JSON."""

    def __init__(self, delimiter: str = ",") -> None:
        self._delimiter = delimiter
        self._columns: list[str] = []

    def restore(self, partial: Path) -> None:
        with partial.open(newline="", encoding="utf-8") as file:
            self._columns = next(csv.reader(file, delimiter=self._delimiter), [])

    def encode(self, rows: Sequence[Values]) -> tuple[bytes, dict[int, str]]:
        text = StringIO()
        writer, quoting_writer = (
            csv.writer(text, delimiter=self._delimiter, lineterminator="\n", quoting=quoting)
            for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)
        )
        if rows and not self._columns:
            self._columns = list(dict.fromkeys(name for row in rows for name in row))
            writer.writerow(self._columns)
        reasons = {}
        for index, row in enumerate(rows):
            if unknown := row.keys() - set(self._columns):
                reasons[index] = (
                    f"column {min(unknown)!r} is in none of the first rows, which decide the columns of a CSV"
                )
            else:
                fields = [_to_field(row.get(column)) for column in self._columns]
                # Python 3.11 does not quote a carriage return by itself, and readers take it for the end of a line.
                has_return = any("\r" in field for field in fields if isinstance(field, str))
                (quoting_writer if has_return else writer).writerow(fields)
        return text.getvalue().encode(), reasons

    def end(self) -> bytes:
        return b""

    def make_file(self, partial: Path, out: Path) -> None:
        os.replace(partial, out)


def _to_field(value: object) -> object:
    if value is None or (isinstance(value, (str, int, float)) and not isinstance(value, bool)):
        return value
    encoded = msgspec.json.encode(value, enc_hook=to_text)
    return msgspec.json.decode(encoded) if encoded.startswith(b'"') else encoded.decode()


def to_text(value: object) -> str:
    """Return a value that msgspec does not know as text: pyarrow gives timestamps in nanoseconds as pandas has them."""
    return str(value.isoformat() if hasattr(value, "isoformat") else value)
