"""Encode rows that are done, and tell those that have no place in the output."""

from collections.abc import Sequence

from scorepool.files.formats.sinks import Sink
from scorepool.files.rows import Done, Row


def encode_rows(sink: Sink, rows: Sequence[Done]) -> tuple[bytes, list[tuple[Row, str]]]:
    """Return the bytes of the rows, and those that failed or do not fit, with the reasons, in their order."""
    good = [(each.row.values or {}) | each.columns for each in rows if each.columns is not None]
    encoded, unfit = sink.encode(good)
    indices = iter(range(len(good)))
    reasons = [(each.row, each.reason if each.columns is None else unfit.get(next(indices), "")) for each in rows]
    return encoded, [(row, reason) for row, reason in reasons if reason]
