"""Open files by the format that their name or an option says.

To add a format: its functions in `_SOURCES` and `_SINKS`, and its names' endings in `_ENDINGS`.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from scorepool.files.errors import BadInput
from scorepool.files.formats.sinks import CsvSink, JsonlSink, Sink
from scorepool.files.formats.text_sources import read_csv, read_jsonl
from scorepool.files.rows import Row

STDIO = "-"
_ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
Opened = tuple[Iterator[Row], Any]  # the rows, and the schema if the format has one


def _text(read: Callable[[BinaryIO, str], Iterator[Row]], file: BinaryIO, name: str) -> Opened:
    return read(file, name), None


def _arrow_files() -> Any:
    """Import what needs pyarrow. Raises BadInput."""
    if find_spec("pyarrow") is None:
        raise BadInput(
            f"Parquet and Arrow files need pyarrow: run `{sys.executable} -m pip install 'scorepool[files]'`"
        )
    return import_module("scorepool.files.formats.arrow_files")


_SOURCES: dict[str, Callable[[BinaryIO, str], Opened]] = {
    "jsonl": partial(_text, read_jsonl),
    "csv": partial(_text, read_csv),
    "tsv": partial(_text, partial(read_csv, delimiter="\t")),
    "parquet": lambda file, name: _arrow_files().read_parquet(file, name),
    "arrow": lambda file, name: _arrow_files().read_arrow(file, name),
}
_SINKS: dict[str, Callable[[Any, tuple[str, ...]], Sink]] = {
    "jsonl": lambda *_: JsonlSink(),
    "csv": lambda *_: CsvSink(),
    "tsv": lambda *_: CsvSink(delimiter="\t"),
    "parquet": lambda schema, new: _arrow_files().ArrowSink(schema, new, is_parquet=True),
    "arrow": lambda schema, new: _arrow_files().ArrowSink(schema, new, is_parquet=False),
}
FORMATS = tuple(_SINKS)


@dataclass(frozen=True, slots=True)
class Source:
    """An open input."""

    name: str  # as errors show it
    path: str  # STDIO: stdin
    rows: Iterator[Row]
    size: int | None  # in the units of `Row.position`; None: not known
    identity: dict[str, Any]  # what must be the same for the work to go on
    schema: Any  # of Arrow; None: the format has none


def show_path(path: str | Path) -> str:
    """Return a path as text that can be encoded. Bytes that are not UTF-8 become `\\xff`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def check_texts(source: Source, columns: Iterable[str]) -> None:
    """Check that columns may hold texts or lists, if the format says what they hold. Raises BadInput."""
    if source.schema is not None:
        _arrow_files().check_texts(source.schema, columns, source.name)


def is_table(path: str) -> bool:
    """True if the end of a path names a format."""
    return Path(path).suffix.lower() in _ENDINGS


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
        if found == "parquet":
            raise BadInput("a Parquet file cannot be read from stdin: expected its path")
        rows, schema = _SOURCES[found](_stdin(), "stdin")
        yield Source("stdin", STDIO, rows, None, {"FILE": STDIO}, schema)
        return
    with ExitStack() as stack:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            file = open(descriptor, "rb", closefd=False)  # noqa: SIM115 - close() waits for reads
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror}") from None
        stat = Path(path).stat()
        identity = {
            "FILE": show_path(Path(path).absolute()),
            "FILE's size": stat.st_size,
            "FILE's time": stat.st_mtime_ns,
        }
        name = show_path(path)
        rows, schema = _SOURCES[found](file, name)
        yield Source(name, path, rows, stat.st_size, identity, schema)


def _stdin() -> BinaryIO:
    """Return a reader of stdin: Python must not exit while another thread reads sys.stdin. Raises BadInput."""
    if sys.stdin is None:
        raise BadInput("stdin is closed: expected rows, or the path of FILE")
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except OSError:  # it is no file
        return sys.stdin.buffer


def make_sink(path: str, given: str | None, source: Source, new_columns: tuple[str, ...]) -> Sink:
    """Return the sink for an output of a source's rows with new columns. Raises BadInput."""
    found = format_of(path, given)
    if found == "parquet" and path == STDIO:
        raise BadInput("a Parquet file cannot be written to stdout: expected a path, or --output-format arrow")
    if path == STDIO and sys.stdout is None:
        raise BadInput("stdout is closed: expected the path of OUT")
    return _SINKS[found](source.schema, new_columns)
