"""One system with one model, in a process of its own: reads what to generate as lines of JSON, and answers likewise.

    python -m bench.model_table.system scorepool|mlx_lm FOLDER

On a CPU both compute in float32, with the same BLAS. mlx_lm runs `stream_generate`, which its commands use; its server
has HTTP around the same model (bench.latency compares servers).
"""

# ruff: noqa: E402 - the BLAS must be loaded before mlx
from scorepool.engine.model import blas

blas.load()

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import mlx.core as mx
import mlx_lm

from scorepool.engine import Engine, EngineSettings, Sampling, Sequence


class Work(TypedDict):
    """What to generate."""

    prompt: list[int]
    max_tokens: int
    top_logprobs: int


class Timed(TypedDict):
    """When tokens came, in seconds since the beginning, and what it took."""

    first_s: float
    last_s: float
    num_tokens: int
    cached_tokens: int
    peak_bytes: int  # of MLX, weights included
    backend: str


def main() -> None:
    system, folder = sys.argv[1:]
    generate = {"scorepool": scorepool, "mlx_lm": mlx}[system](Path(folder))
    for line in sys.stdin:
        print(json.dumps(generate(json.loads(line))), flush=True)


def scorepool(folder: Path) -> Callable[[Work], Timed]:
    """Load the engine. It generates one row at a time here, and keeps prompts that it sees again."""
    engine = Engine(EngineSettings(model=str(folder), dtype=dtype()))

    def generate(work: Work) -> Timed:
        times: list[float] = []
        sampling = Sampling(max_tokens=work["max_tokens"], temperature=0, ignore_eos=True)
        sequence = Sequence(token_ids=work["prompt"], sampling=sampling, top_logprobs=work["top_logprobs"])
        began = time.perf_counter()
        engine.add([sequence], on_step=lambda _: times.append(time.perf_counter() - began)).result()
        return timed(times, sequence.num_cached, engine.model_info.backend)

    return generate


def mlx(folder: Path) -> Callable[[Work], Timed]:
    """Load mlx_lm's model."""
    loaded: Any = mlx_lm.load(str(folder))
    model, tokenizer = loaded[:2]
    if dtype() == "float32":
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())

    def generate(work: Work) -> Timed:
        times: list[float] = []
        began = time.perf_counter()
        for _ in mlx_lm.stream_generate(model, tokenizer, work["prompt"], max_tokens=work["max_tokens"]):
            times.append(time.perf_counter() - began)
        return timed(times, 0, "")

    return generate


def dtype() -> Any:
    return "float32" if mx.default_device() == mx.cpu else "auto"


def timed(times: list[float], cached_tokens: int, backend: str) -> Timed:
    return Timed(
        first_s=times[0],
        last_s=times[-1],
        num_tokens=len(times),
        cached_tokens=cached_tokens,
        peak_bytes=mx.get_peak_memory(),
        backend=backend,
    )


if __name__ == "__main__":
    main()
