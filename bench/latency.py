"""Completions streamed to clients, beside mlx_lm.server: tokens a second, time to the first, CPU time a token.

    python -m bench.latency [--clients 1 16] [--tokens 64]

Both serve the same weights in float32 with the same BLAS and decode greedily; each lap has prompts of its own. Client
and servers share the machine's cores, so the CPU time of the serving processes, all of them, is shown beside the clock.
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
from functools import partial
from pathlib import Path
from random import Random

import httpx
import mlx.core as mx
import psutil

from bench import models
from bench.race import announce, options, parse, ratio
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack

_START_S = 120.0
_APART_S = 0.002  # between two streams' starts: mlx_lm.server takes five connections at once, and resets others
_SERVER = "from scorepool.engine.model import blas; blas.load(); from mlx_lm.server import main; main()"


@dataclass(frozen=True, slots=True)
class Side:
    url: str  # of the OpenAI dialect
    model: str  # as it is called there
    pids: list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    first_s: float  # until the first chunk with text
    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Lap:
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
    parser = options(__doc__, runs=15)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16], help="streams at once")
    parser.add_argument("--tokens", type=int, default=64, help="of each stream, at most")
    given = parse(parser)
    if given.quick:
        given.clients, given.tokens, given.runs = [2], 8, 1

    model = models.find(given.model)
    with tempfile.TemporaryDirectory() as state, ours(model, Path(state)) as us, peer(model, Path(state)) as them:
        for count in given.clients:
            announce(f"{count} streams of {given.tokens} tokens at most", given.model, "cpu")
            laps: list[tuple[Lap, Lap]] = []
            for number in range(given.runs + 1):
                prompts = [f"Item number {Random(100 * number + i).randrange(10**6)} of the" for i in range(count)]
                sides = [asyncio.run(lap(side, prompts, given.tokens)) for side in (us, them)]
                laps.append((sides[0], sides[1]))
            report(laps[1:])  # the first warms up


@contextmanager
def ours(model: models.Model, state: Path) -> Iterator[Side]:
    environ = {"SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_DTYPE": "float32"}
    with Stack([f"{model.name}={model.folder}"], state=state, environ=environ, logs=state / "logs") as stack:
        pids = [stack.pid("api"), stack.pid(f"worker {model.name}")]
        if stack.redis is not None and stack.redis.process is not None:
            pids.append(stack.redis.process.pid)
        yield Side(f"{stack.url}/v1", model.name, pids)


@contextmanager
def peer(model: models.Model, state: Path) -> Iterator[Side]:
    """mlx_lm.server, which computes in the dtype of the checkpoint: so it gets one in float32."""
    folder, port = state / "float32", free_port()
    to_float32(model.folder, folder)
    command = [sys.executable, "-c", _SERVER, "--model", str(folder), "--port", str(port), "--log-level", "ERROR"]
    with (state / "mlx_lm.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=models.ROOT, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        _await(f"{url}/health", process)
        yield Side(f"{url}/v1", str(folder), [process.pid])
    finally:
        process.kill()
        process.wait()


def to_float32(source: Path, folder: Path) -> None:
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            weights: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
            cast = {name: array.astype(mx.float32) for name, array in weights.items()}
            mx.save_safetensors(str(folder / file.name), cast, {"format": "mlx"})
        elif file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())


def _await(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Until it answers. Raises RuntimeError if the process ends first, or takes too long."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise RuntimeError(f"mlx_lm.server does not answer at {url}")


async def lap(side: Side, prompts: list[str], max_tokens: int) -> Lap:
    """All prompts beside each other, a connection each."""
    async with httpx.AsyncClient(timeout=600) as client:
        cpu_s, started = _cpu_s(side.pids), time.perf_counter()
        streams = []
        for prompt in prompts:
            streams.append(asyncio.create_task(stream(client, side, prompt, max_tokens)))
            await asyncio.sleep(_APART_S)
        answers = await asyncio.gather(*streams)
        return Lap(time.perf_counter() - started, _cpu_s(side.pids) - cpu_s, answers)


async def stream(client: httpx.AsyncClient, side: Side, prompt: str, max_tokens: int) -> Answer:
    body = {"model": side.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    started = time.perf_counter()
    first_s, pieces, num_tokens = 0.0, [], 0
    async with client.stream("POST", f"{side.url}/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):  # nothing, a comment or the end
                continue
            chunk = json.loads(line.removeprefix("data: "))
            pieces += [choice["text"] for choice in chunk["choices"]]
            first_s = first_s or time.perf_counter() - started
            if chunk.get("usage"):
                num_tokens = chunk["usage"]["completion_tokens"]
    return Answer(first_s, "".join(pieces), num_tokens)


def _cpu_s(pids: list[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


def report(laps: list[tuple[Lap, Lap]]) -> None:
    """Ratios above 1: the peer took longer."""
    print(f"{'':16} {'tokens/s':>9} {'ratio':>7} {'first, ms':>10} {'ratio':>7} {'CPU ms a token':>15} {'ratio':>7}")
    figures: list[Callable[[Lap], float]] = [
        lambda lap: lap.wall_s / lap.num_tokens,
        lambda lap: lap.first_s,
        lambda lap: lap.cpu_s / lap.num_tokens,
    ]
    for name, side in (("scorepool", 0), ("mlx_lm.server", 1)):
        of = partial(_figures, [pair[side] for pair in laps])
        wall, first, cpu = map(of, figures)
        ratios = [ratio(of(figure), _figures([pair[0] for pair in laps], figure)) for figure in figures]
        print(
            f"{name:16} {1 / statistics.median(wall):9,.0f} {ratios[0]:6.2f}x {statistics.median(first) * 1e3:10.1f} "
            f"{ratios[1]:6.2f}x {statistics.median(cpu) * 1e3:15.2f} {ratios[2]:6.2f}x"
        )
    differing = sum(a.text != b.text for us, them in laps for a, b in zip(us.answers, them.answers, strict=True))
    print(f"texts that differ: {differing} of {sum(len(us.answers) for us, _ in laps)}")


def _figures(laps: list[Lap], figure: Callable[[Lap], float]) -> list[float]:
    return [figure(lap) for lap in laps]


if __name__ == "__main__":
    main()
