"""Run several systems on the same work in turns, so that a busy machine slows all of them alike.

A comparison reports the times of each system and how far its results differ from those of the first one. This module
knows no model and no engine.
"""

import os
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from random import Random
from typing import Generic, TypeVar

_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_LIBRARIES = ("mlx", "mlx-lm", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Item:
    """Token ids of a prompt and of the completion to score after it."""

    prompt: list[int]
    completion: list[int]


T = TypeVar("T")
Scores = list[list[float]]  # per item: log p of each completion token, or only their sum
Scorer = Callable[[list[Item]], Scores]


@dataclass(frozen=True, slots=True)
class Timing:
    cpu_s: float  # of the whole process, all threads
    wall_s: float


@dataclass(slots=True)
class Measurement(Generic[T]):
    """The timing of each run of one system, and its results for every item of every run."""

    timings: list[Timing] = field(default_factory=list)
    results: list[T] = field(default_factory=list)


def make_parser(description: str | None, *, runs: int = 5) -> ArgumentParser:
    """Make a parser with the options that all comparisons have. `description` is the module's docstring."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        choices=("demo", "wide", "0.6b"),
        default="demo",
        help="demo: the shipped model; wide: random weights with a vocabulary of 151,936; "
        "0.6b: random weights in the shape of Qwen3-0.6B (default: %(default)s)",
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=runs,
        help="measured runs of each system; medians are shown (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, help="cores for the BLAS of every system (default: all)")
    parser.add_argument("--exact", action="store_true", help="measure scorepool's exact mode too")
    parser.add_argument("--quick", action="store_true", help="small sizes and one run, to check that everything works")
    return parser


def parse_arguments(parser: ArgumentParser) -> Namespace:
    """Parse the command line. With --threads, restart the process with the limit, which BLAS libraries read at load."""
    arguments = parser.parse_args()
    limit = dict.fromkeys(_THREADS, str(arguments.threads))
    if arguments.threads and not limit.items() <= os.environ.items():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **limit})  # the same command
    return arguments


def draw_tokens(draw: Random, count: int, vocab_size: int) -> list[int]:
    return [draw.randrange(3, vocab_size) for _ in range(count)]  # the first ids are special


def time_call(work: Callable[[], T]) -> tuple[Timing, T]:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    result = work()
    return Timing(time.process_time() - cpu_s, time.perf_counter() - wall_s), result


def compare(
    systems: dict[str, Callable[[list[Item]], list[T]]], draw_items: Callable[[Random], list[Item]], runs: int
) -> dict[str, Measurement[T]]:
    """Warm up each system on one item, then run them in turns.

    Every run draws new items, the same for every system, so that no system can use a cache of an earlier run's prompts.
    """
    measurements: dict[str, Measurement[T]] = {name: Measurement() for name in systems}
    for system in systems.values():
        system(draw_items(Random(0))[:1])
    for number in range(1, runs + 1):
        items = draw_items(Random(number))
        for name, system in systems.items():
            timing, results = time_call(partial(system, items))
            measurements[name].timings.append(timing)
            measurements[name].results += results
    return measurements


def max_difference(scores: Scores, others: Scores) -> str:
    """Describe the largest difference of a token, or of an item's sum if one of the systems reports only sums."""
    largest = 0.0
    for one, other in zip(scores, others, strict=True):
        pairs = zip(one, other, strict=True) if len(one) == len(other) else [(sum(one), sum(other))]
        largest = max([largest, *(abs(a - b) for a, b in pairs)])
    return f"{largest:.1e} nats"


def median_ratio(values: Iterable[float], references: Iterable[float]) -> float:
    """Return the median of each run's value divided by the reference of the same run."""
    return statistics.median(value / reference for value, reference in zip(values, references, strict=True))


def print_comparison(
    measurements: dict[str, Measurement[T]], difference: Callable[[list[T], list[T]], str], num_tokens: int
) -> None:
    """Print a line per system. Ratios are relative to the first system: above 1 the system took longer.

    `num_tokens` is the number of tokens of one run.
    """
    first, *_ = measurements.values()
    print(f"{'':34} {'CPU s':>9} {'ratio':>7} {'wall s':>9} {'ratio':>7} {'tokens/s':>9}   difference")
    for name, measured in measurements.items():
        cpu, wall = [timing.cpu_s for timing in measured.timings], [timing.wall_s for timing in measured.timings]
        cpu_ratio = median_ratio(cpu, (timing.cpu_s for timing in first.timings))
        wall_ratio = median_ratio(wall, (timing.wall_s for timing in first.timings))
        print(
            f"{name:34} {statistics.median(cpu):9.3f} {cpu_ratio:6.2f}x {statistics.median(wall):9.3f} "
            f"{wall_ratio:6.2f}x {num_tokens / statistics.median(wall):9,.0f}   "
            f"{difference(first.results, measured.results)}",
            flush=True,
        )


def print_header(title: str, model: str, backend: str) -> None:
    print(f"\n{title}\n{conditions(model, backend)}", flush=True)


def conditions(model: str, backend: str) -> str:
    """Describe what the figures depend on: model, dtype, backend, cores and versions."""
    threads = os.environ.get(_THREADS[0], "all")
    versions = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    return f"model {model}, float32, {backend}, {threads} of {os.cpu_count()} cores; {versions}"


def num_tokens(items: list[Item]) -> int:
    """Count the tokens of all items; a shared prompt counts once per item."""
    return sum(len(item.prompt) + len(item.completion) for item in items)


def describe(items: list[Item]) -> str:
    scored = sum(len(item.completion) for item in items)
    return f"{len(items)} sequences: {num_tokens(items) - scored:,} prompt tokens, {scored:,} scored"
