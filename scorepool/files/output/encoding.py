"""Encode rows that are done, and tell those that have no place in the output."""

from collections.abc import Sequence

from scorepool.files.formats.sinks import Sink
from scorepool.files.rows import Done, Row


def encode_rows(sink: Sink, rows: Sequence[Done]) -> tuple[bytes, list[tuple[Row, str]]]:
    """Return the bytes of the rows, and those that failed or do not fit, with the reasons, in their order."""
    reasons = [_fault_of(each) for each in rows]
    good = [index for index, reason in enumerate(reasons) if not reason]
    encoded, unfit = sink.encode([(rows[index].row.values or {}) | (rows[index].columns or {}) for index in good])
    for at, reason in unfit.items():
        reasons[good[at]] = reason
    return encoded, [(each.row, reason) for each, reason in zip(rows, reasons, strict=True) if reason]


def _fault_of(done: Done) -> str:
    """Return the reason why a row has no place in any output; empty: there is none."""
    if done.columns is None:
        return done.reason
    doubled = (done.row.values or {}).keys() & done.columns.keys()
    return f"the row has a column {min(doubled)!r}, as the output: rename it" if doubled else ""
