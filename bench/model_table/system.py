"""One system with one model, in a process of its own: reads what to generate as lines of JSON, and answers likewise.

    python -m bench.model_table.system scorepool|mlx_lm|mlx_lm.server|llama.cpp SHAPE [BITS]

On a CPU all compute in float32, and those of MLX with the same BLAS. mlx_lm runs `stream_generate`, which its commands
use; mlx_lm.server is asked over HTTP. llama.cpp has its own file of the same weights, Q4_0 for 4 bits, and threads.
"""

# ruff: noqa: E402 - MLX must be prepared before it is imported
from scorepool.engine.model import products

products.prepare()

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

import httpx
import mlx.core as mx
import mlx_lm

from bench import gguf_file, llama_cpp
from bench.latency import Server, serve_mlx_lm
from bench.model_table import shapes
from bench.model_table.words import Words
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
    peak_bytes: int | None  # of MLX in this process, weights included
    backend: str


Generate = Callable[[Work], Timed]


def main() -> None:
    system, name, bits = sys.argv[1:]
    with SYSTEMS[system](name, int(bits) if bits else None) as generate:
        for line in sys.stdin:
            print(json.dumps(generate(json.loads(line))), flush=True)


@contextmanager
def scorepool(name: str, bits: int | None) -> Iterator[Generate]:
    """Load the engine. It generates one row at a time here, and keeps prompts that it sees again."""
    engine = Engine(EngineSettings(model=str(shapes.checkpoint(name, bits)), dtype=dtype()))

    def generate(work: Work) -> Timed:
        times: list[float] = []
        sampling = Sampling(max_tokens=work["max_tokens"], temperature=0, ignore_eos=True)
        sequence = Sequence(token_ids=work["prompt"], sampling=sampling, top_logprobs=work["top_logprobs"])
        began = time.perf_counter()
        engine.add([sequence], on_step=lambda _: times.append(time.perf_counter() - began)).result()
        return timed(times, sequence.num_cached, engine.model_info.backend)

    yield generate


@contextmanager
def mlx(name: str, bits: int | None) -> Iterator[Generate]:
    """Load mlx_lm's model."""
    loaded: Any = mlx_lm.load(str(shapes.checkpoint(name, bits)))
    model, tokenizer = loaded[:2]
    if dtype() == "float32":
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())

    def generate(work: Work) -> Timed:
        times: list[float] = []
        began = time.perf_counter()
        for _ in mlx_lm.stream_generate(model, tokenizer, work["prompt"], max_tokens=work["max_tokens"]):
            times.append(time.perf_counter() - began)
        return timed(times)

    yield generate


@contextmanager
def mlx_server(name: str, bits: int | None) -> Iterator[Generate]:
    """Serve the model with mlx_lm.server, which takes texts only: as many words of one token as the prompt has ids.

    Tokens of random weights have no text, so no stream shows when they come: one request ends with the first token,
    the next finds the prompt in the server's cache and generates all of them.
    """
    folder = shapes.checkpoint(name, bits)
    words = Words(folder)
    with (
        TemporaryDirectory() as state,
        serve_mlx_lm(folder, Path(state), as_float32=dtype() == "float32") as server,
        httpx.Client(timeout=None) as http,
    ):
        ask = partial(_ask, http, server)

        def generate(work: Work) -> Timed:
            prompt = words.text(work["prompt"])
            first_s = ask(prompt, 1, cached=False)
            all_s = ask(prompt, work["max_tokens"], cached=True)
            count = work["max_tokens"]
            return timed([first_s, *(first_s + all_s * number / count for number in range(1, count))], peak=False)

        yield generate


def _ask(http: httpx.Client, server: Server, prompt: str, max_tokens: int, *, cached: bool) -> float:
    """Return the seconds of a completion. Raises RuntimeError if it is not of the work that was asked for."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    began = time.perf_counter()
    reply = http.post(f"{server.url}/completions", json=body)
    seconds = time.perf_counter() - began
    usage = reply.raise_for_status().json()["usage"]
    num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if usage["completion_tokens"] != max_tokens or bool(num_cached) is not cached:
        raise RuntimeError(f"mlx_lm.server did other work: {usage}, for {max_tokens} tokens, cached: {cached}")
    return seconds


@contextmanager
def llama(name: str, bits: int | None) -> Iterator[Generate]:
    """Load llama.cpp with the weights of the checkpoint in bfloat16, in float32 or quantised by its own rule.

    Its file, of up to 4 bytes a weight, is deleted when it is open.
    """
    folder = shapes.checkpoint(name, None)
    model = llama_cpp.LlamaCpp(folder, 1, bits or 32)
    gguf_file.write(folder, bits or 32).unlink()

    def generate(work: Work) -> Timed:
        times: list[float] = []
        began = time.perf_counter()
        model.generate([work["prompt"]], work["max_tokens"], lambda: times.append(time.perf_counter() - began))
        return timed(times, peak=False)

    yield generate


SYSTEMS: dict[str, Callable[[str, int | None], AbstractContextManager[Generate]]] = {
    "scorepool": scorepool,
    "mlx_lm": mlx,
    "mlx_lm.server": mlx_server,
    "llama.cpp": llama,
}


def dtype() -> Any:
    return "float32" if mx.default_device() == mx.cpu else "auto"


def timed(times: list[float], cached_tokens: int = 0, backend: str = "", *, peak: bool = True) -> Timed:
    return Timed(
        first_s=times[0],
        last_s=times[-1],
        num_tokens=len(times),
        cached_tokens=cached_tokens,
        peak_bytes=mx.get_peak_memory() if peak else None,
        backend=backend,
    )


if __name__ == "__main__":
    main()
