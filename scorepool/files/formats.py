"""Open files by the format that their name or an option says.

To add a format: its functions in `_SOURCES` and `_SINKS`, and its names' endings in `_ENDINGS`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from scorepool.files.errors import BadInput
from scorepool.files.rows import Row
from scorepool.files.sinks import CsvSink, JsonlSink, Sink
from scorepool.files.text_sources import read_csv, read_jsonl

STDIO = "-"
_ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv"}
_SOURCES: dict[str, Callable[[BinaryIO, str], Iterator[Row]]] = {
    "jsonl": read_jsonl,
    "csv": read_csv,
    "tsv": partial(read_csv, delimiter="\t"),
}
_SINKS: dict[str, Callable[[], Sink]] = {"jsonl": JsonlSink, "csv": CsvSink, "tsv": partial(CsvSink, delimiter="\t")}
FORMATS = tuple(_SINKS)


@dataclass(frozen=True, slots=True)
class Source:
    """An open input."""

    name: str  # as errors show it
    rows: Iterator[Row]
    size: int | None  # in the units of `Row.position`; None: not known
    identity: dict[str, Any]  # what must be the same for the work to go on


def format_of(path: str, given: str | None) -> str:
    """Return the format of a path. Raises BadInput."""
    found = given or ("jsonl" if path == STDIO else _ENDINGS.get(Path(path).suffix.lower(), ""))
    if found not in FORMATS:
        raise BadInput(f"{path} is of no known format: expected one of {', '.join(_ENDINGS)}, or a format by an option")
    return found


def open_source(path: str, given: str | None) -> AbstractContextManager[Source]:
    """Open an input, `-` being stdin. Raises BadInput."""
    return _open_source(path, format_of(path, given))


@contextmanager
def _open_source(path: str, found: str) -> Iterator[Source]:
    if path == STDIO:
        yield Source("stdin", _SOURCES[found](sys.stdin.buffer, "stdin"), None, {"FILE": STDIO})
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(Path(path).open("rb"))
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror}") from None
        stat = Path(path).stat()
        identity = {"FILE": str(Path(path).absolute()), "FILE's size": stat.st_size, "FILE's time": stat.st_mtime_ns}
        yield Source(path, _SOURCES[found](file, path), stat.st_size, identity)


def make_sink(path: str, given: str | None) -> Sink:
    """Return the sink for an output. Raises BadInput."""
    return _SINKS[format_of(path, given)]()
