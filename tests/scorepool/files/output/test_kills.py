"""A process may end before any line of the code that writes OUT: each row is there once after the next process."""

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scorepool.files import output
from scorepool.files.formats import arrow_files, sinks
from scorepool.files.formats.arrow_files import ArrowSink
from scorepool.files.formats.sinks import CsvSink, JsonlSink, Sink
from scorepool.files.output.journal import JournaledOutput
from scorepool.files.rows import Done, Row

NUM_ROWS = 8
BAD = {2, 5, 8}
KILLED_CODE = (str(Path(output.__file__).parent), sinks.__file__, arrow_files.__file__)
OLD = (b"old rows", b"old errors")


class Killed(BaseException):
    """The end of a process."""


class Tracer:
    """Counts the lines of the code that writes OUT, and calls a function before each with their number."""

    def __init__(self, before_line: Callable[[int], None]) -> None:
        self._num_lines, self._before_line = 0, before_line

    def __call__(self, frame: FrameType, event: str, argument: object) -> "Tracer | None":
        if not frame.f_code.co_filename.startswith(KILLED_CODE):
            return None
        if event == "line":
            self._before_line(self._num_lines)
            self._num_lines += 1
        return self


@contextmanager
def traced(before_line: Callable[[int], None]) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(Tracer(before_line))
    try:
        yield
    finally:
        sys.settrace(before)


class Disk:
    """Remembers what of each file has reached the disk, for a loss of power takes the rest of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._synced: dict[int, int] = {}  # bytes by inode
        monkeypatch.setattr(os, "fsync", self._sync)  # and the test need not wait for it

    def _sync(self, descriptor: int) -> None:
        stat = os.fstat(descriptor)
        self._synced[stat.st_ino] = stat.st_size

    def lose_power(self, folder: Path) -> None:
        for path in folder.iterdir():
            stat = path.stat()
            if stat.st_size > (synced := self._synced.get(stat.st_ino, 0)) and path.read_bytes() not in OLD:
                os.truncate(path, synced)

    def state(self, folder: Path) -> list[tuple[str, int, int | None]]:
        """Return the size of each file, and what of it has reached the disk."""
        stats = {path.name: path.stat() for path in folder.iterdir()}
        return sorted((name, each.st_size, self._synced.get(each.st_ino)) for name, each in stats.items())


def sink_of(out: Path) -> Sink:
    sinks_by_ending: dict[str, Sink] = {
        ".jsonl": JsonlSink(),
        ".csv": CsvSink(),
        ".parquet": ArrowSink(None, (), is_parquet=True),
        ".arrow": ArrowSink(None, (), is_parquet=False),
    }
    return sinks_by_ending[out.suffix]


def work(out: Path, *, overwrite: bool = False) -> None:
    """Write the rows that OUT has not, as `process_rows` does, with a checkpoint after every other chunk."""
    written = JournaledOutput(out, sink_of(out), {"FILE": "in"}, overwrite)
    if not written.is_complete:
        for number in range(written.counts.num_rows + 1, NUM_ROWS + 1, 2):
            chunk = range(number, min(number + 2, NUM_ROWS + 1))
            rows = [Row(each, each, each, {"a": each}) for each in chunk]
            written.write(
                [Done(row, reason="bad") if row.number in BAD else Done(row, {"b": -row.number}) for row in rows]
            )
            if number % 4 == 3:
                written.save()
    written.finish()
    written.close()


def killed(out: Path, line: int, *, overwrite: bool) -> None:
    """Work until a line. Nothing of the process is left then but its files."""

    def kill(at: int) -> None:
        if at == line:
            raise Killed

    with suppress(Killed), traced(kill):
        work(out, overwrite=overwrite)


def lines_that_change_the_disk(out: Path, disk: Disk, *, overwrite: bool) -> list[int]:
    """Return the lines before which the files are not as before the line before."""
    states = []
    with traced(lambda _: states.append(disk.state(out.parent))):
        work(out, overwrite=overwrite)
    return [line for line, state in enumerate(states) if not line or state != states[line - 1]]


def read(out: Path) -> list[tuple[int, int]]:
    """Return the columns `a` and `b`."""
    if out.suffix == ".jsonl":
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    elif out.suffix == ".csv":
        header, *lines = out.read_text().splitlines()
        rows = [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
    elif out.suffix == ".parquet":
        rows = pq.read_table(out).to_pylist()
    else:
        with pa.OSFile(str(out)) as file:
            rows = pa.ipc.open_file(file).read_all().to_pylist()
    return [(int(row["a"]), int(row["b"])) for row in rows]


def is_done(out: Path, *, overwrite: bool) -> bool:
    """True if a user would not give the command again."""
    return out.exists() and not overwrite and not out.with_name(f"{out.name}.journal").exists()


def check_rows(out: Path) -> None:
    assert read(out) == [(number, -number) for number in range(1, NUM_ROWS + 1) if number not in BAD]


def check(out: Path) -> None:
    """Check that OUT is complete, and nothing is left beside it."""
    errors = out.with_name(f"{out.name}.errors.jsonl")
    check_rows(out)
    assert [json.loads(line)["row"] for line in errors.read_text().splitlines()] == sorted(BAD)
    assert sorted(each.name for each in out.parent.iterdir()) == [out.name, errors.name]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # nobody closes a process's files
@pytest.mark.parametrize("loses_power", [False, True], ids=["killed", "without power"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet", "out.arrow"])
def test_every_row_is_there_once_wherever_processes_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, overwrite: bool, loses_power: bool
):
    def begin(folder: Path) -> Path:
        folder.mkdir()
        if overwrite:
            for path, content in zip((folder / name, folder / f"{name}.errors.jsonl"), OLD, strict=True):
                path.write_bytes(content)
        return folder / name

    disk = Disk(monkeypatch)
    lines = lines_that_change_the_disk(begin(tmp_path / "undisturbed"), disk, overwrite=overwrite)
    assert len(lines) > 20
    randomness = random.Random(name)
    for line in lines:
        out = begin(tmp_path / str(line))
        for at in (line, randomness.choice(lines)):
            if not is_done(out, overwrite=overwrite):
                killed(out, at, overwrite=overwrite)
            if loses_power:
                disk.lose_power(out.parent)
            if overwrite and out.read_bytes() not in OLD:
                check_rows(out)
        if not is_done(out, overwrite=overwrite):
            work(out, overwrite=overwrite)
        check(out)
