"""Compare streamed completions with mlx_lm.server: tokens per second, time to the first token, CPU time per token.

    python -m bench.latency [--clients 1 16] [--tokens 64]

Both servers load the same weights in float32 with the same BLAS and decode greedily; each run has new prompts. Client
and servers share the machine's cores, so the CPU time of all serving processes is shown beside the wall clock.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx
import mlx.core as mx
import psutil

from bench import models
from bench.compare import make_parser, median_ratio, parse_arguments, print_header
from scorepool.engine.model.device import gpu_kind
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack

_START_S = 120.0
_START_INTERVAL_S = 0.002  # between two streams' starts: mlx_lm.server accepts 5 connections at once, resets others
_SERVER = "from scorepool.engine.model import products; products.prepare(); from mlx_lm.server import main; main()"


@dataclass(frozen=True, slots=True)
class Server:
    url: str  # base URL of the OpenAI API
    model: str  # the model's name in that API
    pids: list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    first_s: float  # from the request to the first chunk with text
    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    wall_s: float
    cpu_s: float  # of the serving processes
    answers: list[Answer]

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def first_s(self) -> float:
        return statistics.mean(answer.first_s for answer in self.answers)


def main() -> None:
    parser = make_parser(__doc__, runs=15)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16], help="streams at once")
    parser.add_argument("--tokens", type=int, default=64, help="generated tokens of each stream, at most")
    arguments = parse_arguments(parser)
    if arguments.quick:
        arguments.clients, arguments.tokens, arguments.runs = [2], 8, 1

    model = models.find(arguments.model)
    with (
        tempfile.TemporaryDirectory() as state,
        serve_scorepool(model, Path(state)) as scorepool,
        serve_mlx_lm(model.folder, Path(state)) as peer,
    ):
        for count in arguments.clients:
            print_header(f"{count} streams of at most {arguments.tokens} tokens", arguments.model, gpu_kind() or "cpu")
            pairs: list[tuple[Run, Run]] = []
            for number in range(arguments.runs + 1):
                prompts = [f"Item number {Random(100 * number + i).randrange(10**6)} of the" for i in range(count)]
                runs = [asyncio.run(run(server, prompts, arguments.tokens)) for server in (scorepool, peer)]
                pairs.append((runs[0], runs[1]))
            print_runs(pairs[1:])  # the first is a warm-up


@contextmanager
def serve_scorepool(model: models.Model, state: Path) -> Iterator[Server]:
    environ = {"SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_DTYPE": "float32"}
    with Stack([f"{model.name}={model.folder}"], state=state, environ=environ, logs=state / "logs") as stack:
        pids = [stack.pid("api"), stack.pid(f"worker {model.name}")]
        if stack.redis is not None and stack.redis.process is not None:
            pids.append(stack.redis.process.pid)
        yield Server(f"{stack.url}/v1", model.name, pids)


@contextmanager
def serve_mlx_lm(folder: Path, state: Path, *, as_float32: bool = True) -> Iterator[Server]:
    """Run mlx_lm.server. It computes in the checkpoint's dtype, so that float32 takes a copy of the checkpoint."""
    port = free_port()
    if as_float32:
        folder = copy_as_float32(folder, state / "float32")
    command = [sys.executable, "-c", _SERVER, "--model", str(folder), "--port", str(port), "--log-level", "ERROR"]
    with (state / "mlx_lm.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=models.ROOT, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(f"{url}/health", process)
        yield Server(f"{url}/v1", str(folder), [process.pid])
    finally:
        process.kill()
        process.wait()


def copy_as_float32(source: Path, folder: Path) -> Path:
    """Copy a checkpoint with its floating-point tensors in float32: packed weights of a quantised one stay."""
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            weights: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
            cast = {
                name: array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
                for name, array in weights.items()
            }
            mx.save_safetensors(str(folder / file.name), cast, {"format": "mlx"})
        elif file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Wait until the server answers; raise RuntimeError if the process ends first or takes too long."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise RuntimeError(f"mlx_lm.server does not answer at {url}")


async def run(server: Server, prompts: list[str], max_tokens: int) -> Run:
    """Send all prompts at the same time, each over its own connection."""
    async with httpx.AsyncClient(timeout=600) as client:
        cpu_s, started = _cpu_s(server.pids), time.perf_counter()
        streams = []
        for prompt in prompts:
            streams.append(asyncio.create_task(stream(client, server, prompt, max_tokens)))
            await asyncio.sleep(_START_INTERVAL_S)
        answers = await asyncio.gather(*streams)
        return Run(time.perf_counter() - started, _cpu_s(server.pids) - cpu_s, answers)


async def stream(client: httpx.AsyncClient, server: Server, prompt: str, max_tokens: int) -> Answer:
    body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    started = time.perf_counter()
    first_s, texts, num_tokens = 0.0, [], 0
    async with client.stream("POST", f"{server.url}/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):  # empty, a comment or the end
                continue
            chunk = json.loads(line.removeprefix("data: "))
            texts += [choice["text"] for choice in chunk["choices"]]
            first_s = first_s or time.perf_counter() - started
            if chunk.get("usage"):
                num_tokens = chunk["usage"]["completion_tokens"]
    return Answer(first_s, "".join(texts), num_tokens)


def _cpu_s(pids: list[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(cpu.user + cpu.system for cpu in times)


def print_runs(pairs: list[tuple[Run, Run]]) -> None:
    """Print a line per server. Ratios are relative to scorepool: above 1 the server took longer."""
    print(f"{'':16} {'tokens/s':>9} {'ratio':>7} {'first, ms':>10} {'ratio':>7} {'CPU ms a token':>15} {'ratio':>7}")
    figures: list[Callable[[Run], float]] = [
        lambda run: run.wall_s / run.num_tokens,
        lambda run: run.first_s,
        lambda run: run.cpu_s / run.num_tokens,
    ]
    scorepool_runs = [first for first, _ in pairs]
    for name, runs in (("scorepool", scorepool_runs), ("mlx_lm.server", [second for _, second in pairs])):
        wall, first, cpu = ([figure(run) for run in runs] for figure in figures)
        ratios = [median_ratio(map(figure, runs), map(figure, scorepool_runs)) for figure in figures]
        print(
            f"{name:16} {1 / statistics.median(wall):9,.0f} {ratios[0]:6.2f}x {statistics.median(first) * 1e3:10.1f} "
            f"{ratios[1]:6.2f}x {statistics.median(cpu) * 1e3:15.2f} {ratios[2]:6.2f}x"
        )
    differing = sum(
        answer.text != other.text for one, two in pairs for answer, other in zip(one.answers, two.answers, strict=True)
    )
    print(f"texts that differ: {differing} of {sum(len(run.answers) for run in scorepool_runs)}")


if __name__ == "__main__":
    main()
