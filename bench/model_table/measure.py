"""Measure one model with both systems in turns, each in a process of its own: a row of the table."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random

from msgspec import Struct

from bench.compare import draw_tokens
from bench.model_table import shapes
from bench.model_table.system import Timed, Work

TOP = 20
Generate = Callable[[Work], Timed]


class Row(Struct, frozen=True):
    """What was measured of one model. Medians; times in seconds, speeds in tokens per second."""

    shape: str
    parameters: int
    bits: int  # of a weight as it is computed with: 4, 16 or 32
    prompt_tokens: int
    generated_tokens: int
    runs: int
    prefill_speed: float
    decode_speed: float
    first_cold_s: float
    first_cached_s: float | None  # None: the prompt is too short to be kept
    peak_gib: float
    top20_cost_pct: float  # of decoding
    prefill_ratio: float | None  # to mlx_lm's speed, of the same runs; above 1 scorepool is faster
    decode_ratio: float | None
    mlx_lm_peak_gib: float | None
    load: float = 0.0  # the machine's load average at the end: times of a crowded machine say little


@dataclass(frozen=True, slots=True)
class Sizes:
    prompt_tokens: int
    generated_tokens: int
    runs: int


def measure(name: str, bits: int | None, sizes: Sizes, *, beside_mlx_lm: bool) -> tuple[Row, str]:
    """Return a row, and the backend."""
    folder = shapes.checkpoint(name, bits)
    vocab_size = shapes.vocab_size(folder)
    mine: list[Timed] = []
    peers: list[Timed] = []
    cached: list[Timed] = []
    topped: list[Timed] = []
    others = started("mlx_lm", folder) if beside_mlx_lm else nullcontext(None)
    with started("scorepool", folder) as own, others as peer:
        for number in range(sizes.runs + 1):
            prompt = draw_tokens(Random(number), sizes.prompt_tokens if number else 8, vocab_size)
            work = Work(prompt=prompt, max_tokens=sizes.generated_tokens, top_logprobs=0)
            plain = own(work)
            other = peer(work) if peer else None
            with_top = own({**work, "top_logprobs": TOP})  # the prompt is seen again, and kept
            again = own(work)
            if number:  # the first run warms up
                mine.append(plain)
                peers += [other] if other else []
                topped.append(with_top)
                cached.append(again)
    decode, with_top_speed = ([speed(each) for each in timings] for timings in (mine, topped))
    top20_ratio = statistics.median(one / other for one, other in zip(decode, with_top_speed, strict=True))
    firsts = [each["first_s"] for each in mine]
    return Row(
        shape=name,
        parameters=shapes.num_parameters(name),
        bits=bits or (32 if mine[0]["backend"].startswith("cpu") else 16),
        prompt_tokens=sizes.prompt_tokens,
        generated_tokens=sizes.generated_tokens,
        runs=sizes.runs,
        prefill_speed=sizes.prompt_tokens / statistics.median(firsts),
        decode_speed=statistics.median(decode),
        first_cold_s=statistics.median(firsts),
        first_cached_s=(
            statistics.median(each["first_s"] for each in cached)
            if all(each["cached_tokens"] for each in cached)
            else None
        ),
        peak_gib=mine[-1]["peak_bytes"] / 2**30,
        top20_cost_pct=100 * (top20_ratio - 1),
        prefill_ratio=ratio([each["first_s"] for each in peers], firsts) if peers else None,
        decode_ratio=ratio(decode, [speed(each) for each in peers]),
        mlx_lm_peak_gib=peers[-1]["peak_bytes"] / 2**30 if peers else None,
        load=round(os.getloadavg()[1], 1),
    ), mine[0]["backend"]


def speed(timing: Timed) -> float:
    """Return the tokens per second after the first one."""
    return (timing["num_tokens"] - 1) / (timing["last_s"] - timing["first_s"])


def ratio(values: list[float], references: list[float]) -> float | None:
    """Return the median of each run's ratio; None without references."""
    if not references:
        return None
    return statistics.median(value / reference for value, reference in zip(values, references, strict=True))


@contextmanager
def started(system: str, folder: Path) -> Iterator[Generate]:
    """Start a system, and end it afterwards."""
    command = [sys.executable, "-m", "bench.model_table.system", system, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    def generate(work: Work) -> Timed:
        stdin.write(json.dumps(work) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"{system} ended with {process.wait()} on {folder.name}: see its messages above")
        timing: Timed = json.loads(line)
        return timing

    try:
        yield generate
    finally:
        stdin.close()
        process.wait()
        stdout.close()
