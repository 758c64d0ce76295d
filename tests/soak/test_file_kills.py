"""A file is scored as if nothing happened, while the command, the API and the worker are killed one after the other."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scorepool.files import Counts, Progress, score_file
from scorepool.files.output.journal import beside
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack

NUM_ROWS = int(os.environ.get("SOAK_KILLED_ROWS", "20000"))
WORDS = ("import os", "def f(x):", "return", "for each in range(10):", "print", "class A:", "    ", "\n", "self.a = 1")
KILLS_AT = {"command": 0.25, "api": 0.5, "worker demo": 0.75}  # share of the rows
MAX_WRONG_TOTAL = 0.2  # share by which the time of the whole may be estimated wrongly
ESTIMATES_FROM = 0.1  # share of the input
RESTART_S = 0.5


@pytest.fixture
def stack(root: Path, tmp_path: Path) -> Iterator[Stack]:
    """Run every process, and restart each that dies."""
    environ = {"SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_LEASE_S": "3"}
    model = f"demo={root}/scorepool/models/demo"
    with Stack([model], state=tmp_path / "s", environ=environ, logs=tmp_path / "logs") as stack, restarting(stack):
        yield stack


@contextmanager
def restarting(stack: Stack) -> Iterator[None]:
    stopping = threading.Event()

    def restart() -> None:
        while not stopping.wait(RESTART_S):
            stack.restart_dead()

    thread = threading.Thread(target=restart)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def write_rows(path: Path, num_rows: int) -> None:
    """Write rows of different lengths."""
    randomness = random.Random(1)
    with path.open("w") as file:
        for number in range(num_rows):
            prompt, completion = (" ".join(randomness.choices(WORDS, k=randomness.randint(1, 8))) for _ in range(2))
            file.write(json.dumps({"number": number, "prompt": prompt, "completion": completion}) + "\n")


class Estimates:
    """What the time of the whole was estimated to be, each time that rows were done."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._started_at = time.monotonic()
        self._totals: list[tuple[float, float]] = []  # share of the input, seconds

    def report(self, counts: Counts, size: int | None) -> None:
        if self._progress is None:
            self._progress = Progress()
            self._progress.start(counts)
            self._started_at = time.monotonic()
        self._progress.note(counts)
        left_s = self._progress.left_s(counts, size)
        if size and left_s is not None:
            self._totals.append((counts.position / size, time.monotonic() - self._started_at + left_s))

    def errors(self) -> list[tuple[float, float]]:
        """Return the relative errors, by the share of the input. The work has just ended."""
        total_s = time.monotonic() - self._started_at
        return [(share, estimated_s / total_s - 1) for share, estimated_s in self._totals]


def num_done(out: Path) -> int:
    """Return the rows that the journal has."""
    try:
        return int(json.loads(beside(out, ".journal").read_text())["counts"]["num_rows"])
    except FileNotFoundError:
        return 0


def score_with_kills(stack: Stack, path: Path, out: Path, log: Path) -> None:
    """Score a file, and kill each process once."""
    arguments = [str(Path(sys.executable).with_name("scorepool")), "score", str(path), "-o", str(out)]

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen([*arguments, "--url", stack.url], stderr=file)

    command = start()
    try:
        for name, share in KILLS_AT.items():
            while num_done(out) < share * NUM_ROWS:
                assert command.poll() is None, log.read_text()
                time.sleep(0.01)
            if name == "command":
                command.kill()
                assert command.wait() == -signal.SIGKILL
                assert not out.exists()
                command = start()
            else:
                os.kill(stack.pid(name), signal.SIGKILL)
        assert command.wait() == 0, log.read_text()
    finally:
        command.kill()


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_killed_processes_change_no_row_and_the_time_left_is_right(stack: Stack, tmp_path: Path):
    path, killed, undisturbed = (tmp_path / name for name in ("rows.jsonl", "killed.jsonl", "undisturbed.jsonl"))
    write_rows(path, NUM_ROWS)
    estimates = Estimates()
    started_at = time.monotonic()
    score_file(path, undisturbed, url=stack.url, report=estimates.report)
    errors = estimates.errors()
    undisturbed_s = time.monotonic() - started_at
    score_with_kills(stack, path, killed, tmp_path / "command.log")
    killed_s = time.monotonic() - started_at - undisturbed_s

    expected, found = read_rows(undisturbed), read_rows(killed)
    largest = 0.0
    assert [row["number"] for row in found] == list(range(NUM_ROWS))
    assert [list(row) for row in found] == [list(row) for row in expected]
    for row, other in zip(found, expected, strict=True):
        for name, value in row.items():
            if isinstance(value, float):
                largest = max(largest, abs(value - other[name]) / max(1.0, abs(other[name])))
            else:
                assert value == other[name], (row, other)
    worst = max((abs(error), share) for share, error in errors if share >= ESTIMATES_FROM)
    print(f"\n{NUM_ROWS:,} rows: {undisturbed_s:.1f} s undisturbed, {killed_s:.1f} s with kills")
    print(f"largest difference {largest:.2g}; the time of the whole was wrong by {worst[0]:.1%} at {worst[1]:.0%}")
    for share, error in errors[:: max(1, len(errors) // 20)]:
        print(f"{share:4.0%}  {error:+.1%}")
    assert largest <= 1e-5
    assert worst[0] <= MAX_WRONG_TOTAL
