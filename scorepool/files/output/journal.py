"""Keep how far the work on a file is, so that the same command goes on there after any end of its process.

Beside OUT lie, until every row is done:

    OUT.partial          the rows that are done, in the order of the input
    OUT.errors.partial   a line per row that could not be done: `row`, `line`, `reason`, `input`
    OUT.journal          a Checkpoint: how many rows that is, and the sizes of the files at that row

and afterwards OUT, and OUT.errors.jsonl if some rows could not be done. Those of before stay until then.

A checkpoint is written after the rows have reached the disk, and what was written after the last one is cut off when
the work goes on. So each row is in OUT once. Once a checkpoint says that all rows are done, each step of the end may
come twice.
"""

import fcntl
import os
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
from msgspec import Struct

from scorepool.files.errors import BadInput, OutputError
from scorepool.files.formats.sinks import Sink, to_text
from scorepool.files.output.divergences import Divergences
from scorepool.files.output.encoding import encode_rows
from scorepool.files.output.means import Mean
from scorepool.files.rows import Done, Row

GOES_ON = "; what was done is kept, and the same command goes on"
MAX_INPUT_BYTES = 4096  # of a row in OUT.errors.jsonl
CHECKPOINT_S = 1.0  # between checkpoints: the disk has to follow each of them


class Counts(Struct):
    """What was done so far."""

    num_rows: int = 0  # read, with those that failed
    num_failed: int = 0
    num_tokens: int = 0
    position: int = 0  # in the input
    means: dict[str, Mean] = {}  # of the rows that did not fail
    divergences: dict[str, Divergences] = {}  # of their tokens, by model

    def add(self, rows: Sequence[Done], failed: Collection[int]) -> None:
        """Take rows that are done, of which those with the given numbers failed."""
        self.num_rows += len(rows)
        self.num_failed += len(failed)
        self.num_tokens += sum(each.num_tokens for each in rows)
        self.position = rows[-1].row.position
        for each in rows:
            if each.row.number not in failed:
                for name, value in each.averaged.items():
                    self.means.setdefault(name, Mean()).add(value)
                for model, tokens in each.divergences.items():
                    self.divergences.setdefault(model, Divergences()).add(tokens)


class Checkpoint(Struct, kw_only=True):
    """The content of OUT.journal."""

    command: dict[str, Any]  # what must be the same for the work to go on
    run_id: str
    counts: Counts
    digest: str = ""  # of the rows that were read: they must be the same when the work goes on
    partial_bytes: int = 0
    errors_bytes: int = 0
    undeleted: list[str] = []  # ids of jobs whose rows are in OUT.partial
    replaces_out: bool = False  # an OUT of before stays until every row is done
    is_complete: bool = False


def error_of(row: Row, reason: str) -> dict[str, Any]:
    """Return the line of OUT.errors.jsonl for a row. `input` is the row itself, or its beginning as JSON if it is long,
    so that it can be mended."""
    error: dict[str, Any] = {"row": row.number, "line": row.line, "reason": reason}
    if row.values is None:
        return error
    encoded = msgspec.json.encode(row.values, enc_hook=to_text)
    if len(encoded) <= MAX_INPUT_BYTES:
        return error | {"input": msgspec.Raw(encoded)}
    return error | {"input": encoded[:MAX_INPUT_BYTES].decode(errors="ignore") + "..."}


def beside(out: Path, suffix: str) -> Path:
    """Return the path of a file beside OUT."""
    return out.with_name(out.name + suffix)


def paths_of(out: str) -> list[Path]:
    """Return the path of OUT and of each file beside it; none of stdout."""
    suffixes = ("", ".partial", ".errors.partial", ".journal", ".journal.new", ".errors.jsonl", ".new")
    return [] if out == "-" else [beside(Path(out), suffix) for suffix in suffixes]


class JournaledOutput:
    """OUT and the files beside it. Raises BadInput if OUT exists or is written by another process; OutputError."""

    def __init__(self, out: Path, sink: Sink, command: dict[str, Any], overwrite: bool) -> None:
        self._out, self._sink = out, sink
        self._partial_path, self._journal_path = beside(out, ".partial"), beside(out, ".journal")
        self._errors_partial_path, self.errors_path = beside(out, ".errors.partial"), beside(out, ".errors.jsonl")
        self._checkpoint = Checkpoint(command=command, run_id=uuid.uuid4().hex, counts=Counts())
        self._saved_at = monotonic()
        if not out.parent.is_dir():
            raise BadInput(f"cannot write {out}: there is no folder {out.parent}; nothing was done")
        if out.exists() and not out.is_file():
            raise BadInput(f"{out} is no regular file: give another -o, or `-o -` for stdout")
        with _reported(out, ""), ExitStack() as files:
            self._partial = files.enter_context(_open_locked(self._partial_path, out))
            try:
                self._errors = files.enter_context(self._errors_partial_path.open("ab", buffering=0))
                self._restore(overwrite)
            except (BadInput, OSError):
                self._remove_if_unused()
                raise
            _cut(self._partial, self._checkpoint.partial_bytes)
            _cut(self._errors, self._checkpoint.errors_bytes)
            self._save()
            self._files = files.pop_all()

    @property
    def counts(self) -> Counts:
        return self._checkpoint.counts

    @property
    def run_id(self) -> str:
        return self._checkpoint.run_id

    @property
    def undeleted(self) -> list[str]:
        return self._checkpoint.undeleted

    @property
    def is_complete(self) -> bool:
        """True if every row was done before, and only `finish` is missing."""
        return self._checkpoint.is_complete

    def _restore(self, overwrite: bool) -> None:
        """Go on after the last checkpoint of the same command, if there is one. Raises BadInput."""
        if self._journal_path.exists():
            try:
                self._checkpoint = self._read_checkpoint()
            except BadInput:
                if not overwrite:
                    raise
        if self._out.exists() and not (self.is_complete or self._checkpoint.replaces_out):
            if not overwrite:
                raise BadInput(f"{self._out} exists: give another -o, or --overwrite")
            self._checkpoint.replaces_out = True

    def _read_checkpoint(self) -> Checkpoint:
        """Return the last checkpoint. Raises BadInput if it is of another command."""
        try:
            found = msgspec.json.decode(self._journal_path.read_bytes(), type=Checkpoint)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise BadInput(f"{self._journal_path} is damaged: give --overwrite to begin again") from None
        for name, value in self._checkpoint.command.items():
            if (before := found.command.get(name)) != value:
                raise BadInput(
                    f"{self._out} was begun with {name} {before!r} and cannot go on with {value!r}: give the same "
                    "command, another -o, or --overwrite to begin again"
                )
        if found.is_complete:
            return found
        sizes = {self._partial_path: found.partial_bytes, self._errors_partial_path: found.errors_bytes}
        for path, num_bytes in sizes.items():
            if path.stat().st_size < num_bytes:
                raise BadInput(f"{path} was shortened: give --overwrite to begin again")
        if found.partial_bytes:
            try:
                self._sink.restore(self._partial_path)
            except ValueError:
                raise BadInput(f"{self._partial_path} is damaged: give --overwrite to begin again") from None
        return found

    @property
    def digest(self) -> str:
        """That of the rows that were read for what is written."""
        return self._checkpoint.digest

    @digest.setter
    def digest(self, digest: str) -> None:
        self._checkpoint.digest = digest

    def write(self, rows: Sequence[Done]) -> None:
        """Append rows that are done. Raises OutputError."""
        encoded, failed = encode_rows(self._sink, rows)
        errors = b"".join(msgspec.json.encode(error_of(row, reason)) + b"\n" for row, reason in failed)
        with _reported(self._out):
            _append(self._partial, encoded)
            _append(self._errors, errors)
        self._checkpoint.partial_bytes = self._partial.tell()
        self._checkpoint.errors_bytes = self._errors.tell()
        self.counts.add(rows, {row.number for row, _ in failed})

    def is_due(self) -> bool:
        """True if the last checkpoint is long ago."""
        return monotonic() - self._saved_at >= CHECKPOINT_S

    def save(self) -> None:
        """Write a checkpoint. Raises OutputError."""
        with _reported(self._out):
            self._save()

    def _save(self) -> None:
        for file in (self._partial, self._errors):
            os.fsync(file.fileno())
        new = beside(self._out, ".journal.new")
        with new.open("wb", buffering=0) as journal:
            _append(journal, msgspec.json.encode(self._checkpoint))
            os.fsync(journal.fileno())
        os.replace(new, self._journal_path)
        self._saved_at = monotonic()

    def finish(self) -> None:
        """Make OUT of the partial file, and remove what is not needed any more. Raises OutputError."""
        with _reported(self._out):
            if not self.is_complete:
                self._checkpoint.is_complete = True
                self._save()
            # A file that is empty and should not be was moved by an earlier process.
            if not self._checkpoint.partial_bytes or self._partial_path.stat().st_size:
                self._sink.make_file(self._partial_path, self._out)
            if not self._checkpoint.errors_bytes:
                self.errors_path.unlink(missing_ok=True)
            elif self._errors_partial_path.stat().st_size:
                os.replace(self._errors_partial_path, self.errors_path)
            self._remove_partial()

    def _remove_partial(self) -> None:
        for path in (self._partial_path, self._errors_partial_path, self._journal_path):
            path.unlink(missing_ok=True)

    def _remove_if_unused(self) -> None:
        """Remove the files that were just made, if no process began to work on OUT."""
        if not self._journal_path.exists():
            self._remove_partial()

    def abandon(self) -> None:
        """Remove the files beside OUT if they hold no row, so that a mended command begins anew."""
        if not self.counts.num_rows:
            self._remove_partial()

    def close(self) -> None:
        """Close the files. What is not in a checkpoint is done again by the next process."""
        self._files.close()


@contextmanager
def _reported(out: Path, what_follows: str = GOES_ON) -> Iterator[None]:
    """Turn what the operating system says of the output into an OutputError."""
    try:
        yield
    except OSError as error:
        where = error.filename or out
        raise OutputError(f"cannot write {where}: {error.strerror}{what_follows}") from error


def _open_locked(path: Path, out: Path) -> FileIO:
    file = path.open("ab", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BadInput(f"another process is writing {out}: wait for it, or give another -o") from None
    return file


def _cut(file: FileIO, num_bytes: int) -> None:
    if os.fstat(file.fileno()).st_size > num_bytes:
        file.truncate(num_bytes)
    file.seek(0, os.SEEK_END)


def _append(file: FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
