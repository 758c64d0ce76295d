"""Measure one model with scorepool and each peer in turns, each in a process of its own: a row of the table."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from msgspec import Struct

from bench.compare import draw_tokens
from bench.model_table import shapes
from bench.model_table.system import Timed, Work

TOP = 20
_WARM_UP_TOKENS = 2  # generated ones
Generate = Callable[[Work], Timed]


class Ratios(Struct, frozen=True):
    """A peer beside scorepool, of runs that took turns: above 1 scorepool is faster."""

    prefill: float
    decode: float
    peak_gib: float | None = None  # None: it does not count MLX's memory


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
    beside: dict[str, Ratios] = {}  # by the peer's name
    load: float = 0.0  # the machine's load average at the end: times of a crowded machine say little
    command: str = ""  # that measured it


@dataclass(frozen=True, slots=True)
class Sizes:
    prompt_tokens: int
    generated_tokens: int
    runs: int


def measure(name: str, bits: int | None, sizes: Sizes, peers: Iterable[str]) -> tuple[Row, str]:
    """Return a row, and the backend. One peer is in memory at a time."""
    prompts = _prompts(shapes.vocab_size(shapes.checkpoint(name, bits)), sizes.prompt_tokens)
    beside: dict[str, Ratios] = {}
    with started("scorepool", name, bits) as own:
        _warm_up(own)
        mine = []
        for peer in peers:
            with started(peer, name, bits) as other:
                _warm_up(other)
                turns = [(own(work), other(work)) for work in _works(prompts, sizes)]
            mine += [one for one, _ in turns]
            beside[peer] = _ratios(turns)
        alone = [_alone(own, work) for work in _works(prompts, sizes)]
    mine += [plain for plain, _, _ in alone]
    firsts = [each["first_s"] for each in mine]
    row = Row(
        shape=name,
        parameters=shapes.num_parameters(name),
        bits=bits or (32 if mine[0]["backend"].startswith("cpu") else 16),
        prompt_tokens=sizes.prompt_tokens,
        generated_tokens=sizes.generated_tokens,
        runs=sizes.runs,
        prefill_speed=sizes.prompt_tokens / statistics.median(firsts),
        decode_speed=statistics.median(map(speed, mine)),
        first_cold_s=statistics.median(firsts),
        first_cached_s=(
            statistics.median(cached["first_s"] for _, _, cached in alone)
            if all(cached["cached_tokens"] for _, _, cached in alone)
            else None
        ),
        peak_gib=_gib(mine[-1]["peak_bytes"]) or 0.0,
        top20_cost_pct=100 * (statistics.median(speed(plain) / speed(topped) for plain, topped, _ in alone) - 1),
        beside=beside,
        load=round(os.getloadavg()[1], 1),
    )
    return row, mine[0]["backend"]


def _prompts(vocab_size: int, num_tokens: int) -> Iterator[list[int]]:
    """Yield prompts, each new to all systems."""
    number = 0
    while True:
        yield draw_tokens(Random(number), num_tokens, vocab_size)
        number += 1


def _works(prompts: Iterator[list[int]], sizes: Sizes) -> list[Work]:
    return [Work(prompt=next(prompts), max_tokens=sizes.generated_tokens, top_logprobs=0) for _ in range(sizes.runs)]


def _warm_up(generate: Generate) -> None:
    generate(Work(prompt=list(range(3, 11)), max_tokens=_WARM_UP_TOKENS, top_logprobs=0))


def _alone(own: Generate, work: Work) -> tuple[Timed, Timed, Timed]:
    """Time a new prompt, then with the 20 most likely tokens, then when it was seen twice."""
    return own(work), own({**work, "top_logprobs": TOP}), own(work)


def _ratios(turns: list[tuple[Timed, Timed]]) -> Ratios:
    return Ratios(
        prefill=statistics.median(other["first_s"] / one["first_s"] for one, other in turns),
        decode=statistics.median(speed(one) / speed(other) for one, other in turns),
        peak_gib=_gib(turns[-1][1]["peak_bytes"]),
    )


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / 2**30


def speed(timing: Timed) -> float:
    """Return the tokens per second after the first one."""
    return (timing["num_tokens"] - 1) / (timing["last_s"] - timing["first_s"])


@contextmanager
def started(system: str, name: str, bits: int | None) -> Iterator[Generate]:
    """Start a system with a shape's checkpoint, and end it afterwards."""
    command = [sys.executable, "-m", "bench.model_table.system", system, name, str(bits or "")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    def generate(work: Work) -> Timed:
        stdin.write(json.dumps(work) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"{system} ended with {process.wait()} on {name}: see its messages above")
        timing: Timed = json.loads(line)
        return timing

    try:
        yield generate
    finally:
        stdin.close()
        process.wait()
        stdout.close()
