"""Contestants that do the same work by turns, so that a busy machine slows all of them alike.

The race says who was faster, and what each found, for the fastest wrong answer wins nothing. Knows neither models nor
engines.
"""

import os
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from random import Random
from typing import Generic, TypeVar

_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_LIBRARIES = ("mlx", "mlx-lm", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Row:
    prompt: list[int]
    completion: list[int]


T = TypeVar("T")
Scores = list[list[float]]  # one list a row: log p of each completion token, or their sum alone
Scorer = Callable[[list[Row]], Scores]


@dataclass(frozen=True, slots=True)
class Lap:
    cpu_s: float  # of the whole process, all threads
    wall_s: float


@dataclass(slots=True)
class Track(Generic[T]):
    """What one contestant did."""

    laps: list[Lap] = field(default_factory=list)
    found: list[T] = field(default_factory=list)  # of every row of every lap


def options(description: str | None, *, runs: int = 5) -> ArgumentParser:
    parser = ArgumentParser(description=description)
    parser.add_argument("--model", choices=("demo", "wide", "0.6b"), default="demo", help="see bench/models.py")
    parser.add_argument("--runs", type=int, default=runs, help="laps of each contestant; the median counts")
    parser.add_argument("--threads", type=int, help="cores for every contestant's BLAS; default: all")
    parser.add_argument("--exact", action="store_true", help="run our exact mode too")
    parser.add_argument("--quick", action="store_true", help="a smoke test: small sizes, few laps")
    return parser


def parse(parser: ArgumentParser) -> Namespace:
    """With --threads, in a process that began with the limit: BLAS libraries read it when they are loaded."""
    given = parser.parse_args()
    limit = dict.fromkeys(_THREADS, str(given.threads))
    if given.threads and not limit.items() <= os.environ.items():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **limit})  # this very command
    return given


def draw_tokens(draw: Random, count: int, vocab_size: int) -> list[int]:
    return [draw.randrange(3, vocab_size) for _ in range(count)]  # the first ids are special


def lap(work: Callable[[], T]) -> tuple[Lap, T]:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    found = work()
    return Lap(time.process_time() - cpu_s, time.perf_counter() - wall_s), found


def race(
    contestants: dict[str, Callable[[list[Row]], list[T]]], draw_rows: Callable[[Random], list[Row]], runs: int
) -> dict[str, Track[T]]:
    """Warm each up on one row, then let them run by turns.

    A lap has tokens of its own, the same for every contestant: who keeps caches of prompts gains nothing by having
    seen them in the lap before.
    """
    tracks: dict[str, Track[T]] = {name: Track() for name in contestants}
    for contestant in contestants.values():
        contestant(draw_rows(Random(0))[:1])
    for number in range(1, runs + 1):
        rows = draw_rows(Random(number))
        for name, contestant in contestants.items():
            took, found = lap(partial(contestant, rows))
            tracks[name].laps.append(took)
            tracks[name].found += found
    return tracks


def nats(scores: Scores, others: Scores) -> str:
    """The largest difference between tokens; between sums of rows where one side has no more than those."""
    largest = 0.0
    for row, other in zip(scores, others, strict=True):
        pairs = zip(row, other, strict=True) if len(row) == len(other) else [(sum(row), sum(other))]
        largest = max([largest, *(abs(a - b) for a, b in pairs)])
    return f"{largest:.1e} nats"


def ratio(laps: Iterable[float], others: Iterable[float]) -> float:
    """Median of each lap over the lap beside it."""
    return statistics.median(a / b for a, b in zip(laps, others, strict=True))


def report(tracks: dict[str, Track[T]], difference: Callable[[list[T], list[T]], str], num_tokens: int) -> None:
    """The first is ours, `num_tokens` are those of a lap. Ratios above 1: the peer took longer."""
    ours, *_ = tracks.values()
    print(f"{'':34} {'CPU s':>9} {'ratio':>7} {'wall s':>9} {'ratio':>7} {'tokens/s':>9}   differs by")
    for name, track in tracks.items():
        cpu, wall = [each.cpu_s for each in track.laps], [each.wall_s for each in track.laps]
        cpu_ratio = ratio(cpu, (each.cpu_s for each in ours.laps))
        wall_ratio = ratio(wall, (each.wall_s for each in ours.laps))
        print(
            f"{name:34} {statistics.median(cpu):9.3f} {cpu_ratio:6.2f}x {statistics.median(wall):9.3f} "
            f"{wall_ratio:6.2f}x {num_tokens / statistics.median(wall):9,.0f}   {difference(ours.found, track.found)}",
            flush=True,
        )


def announce(title: str, model: str, backend: str) -> None:
    print(f"\n{title}\n{conditions(model, backend)}", flush=True)


def conditions(model: str, backend: str) -> str:
    """What figures belong to."""
    threads = os.environ.get(_THREADS[0], "all")
    versions = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    return f"model {model}, float32, {backend}, {threads} of {os.cpu_count()} cores; {versions}"


def num_tokens(rows: list[Row]) -> int:
    """Of all rows, each counted whole."""
    return sum(len(row.prompt) + len(row.completion) for row in rows)


def describe(rows: list[Row]) -> str:
    scored = sum(len(row.completion) for row in rows)
    return f"{len(rows)} rows: {num_tokens(rows) - scored:,} prompt tokens, {scored:,} scored"
