"""Jobs through HTTP, Redis and a worker, beside the same rows given to an engine in this process.

    python -m bench.through_queue [--model demo] [--jobs 40] [--small-jobs 1000] [--job-s 0.2]

Both sides share the machine's cores, and the queue's side has more to do there: client, API, Redis and worker are
processes of their own. So the wall clock is shown beside the CPU time of the worker alone, which on a Mac whose GPU
computes is what stands in the way.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import psutil

from bench import models
from bench.peers import open_engine
from bench.race import announce, draw_tokens, lap, options, parse, ratio
from scorepool import Client, wire
from scorepool.engine import Engine, Sequence
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack

_PROMPT, _COMPLETION = 48, 16  # tokens of an item
_MAX_DIFFERENCE = 1e-3  # nats: which rows share a forward is not the same on both sides

Job = list[wire.ScoreItem]


@dataclass(frozen=True, slots=True)
class Run:
    wall_s: float
    engine_cpu_s: float  # of the process that computes
    shares: dict[str, float]  # CPU seconds of every process that took part
    sums: list[float]  # log p of each item


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--jobs", type=int, default=40, help="of about --job-s each")
    parser.add_argument("--job-s", type=float, default=0.2)
    parser.add_argument("--small-jobs", type=int, default=1000, help="of one item each, all in flight at once")
    given = parse(parser)
    if given.quick:
        given.jobs, given.small_jobs, given.job_s, given.runs = 3, 20, 0.02, 1

    model = models.find(given.model)
    engine = open_engine(model.folder)
    draw = Random(0)
    items_per_job = num_items(engine, model.vocab_size, given.job_s)
    with tempfile.TemporaryDirectory() as state, _stack(model, Path(state)) as stack, Client(stack.url) as client:
        for title, count, size in (
            (f"jobs of {items_per_job} items, about {given.job_s} s each", given.jobs, items_per_job),
            ("small jobs of one item, all in flight", given.small_jobs, 1),
        ):
            announce(f"Through the queue, {count} {title}", given.model, engine.model_info.backend)
            through_queue(stack, client, given.model, [draw_job(draw, size, model.vocab_size)])  # warms up
            sides: list[tuple[Run, Run]] = []
            for _ in range(given.runs):  # on prompts of their own, which no cache holds
                jobs = [draw_job(draw, size, model.vocab_size) for _ in range(count)]
                sides.append((in_process(engine, jobs), through_queue(stack, client, given.model, jobs)))
            report(sides, count)
    engine.close()


def _stack(model: models.Model, state: Path) -> Stack:
    environ = {"SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_DTYPE": "float32"}
    return Stack([f"{model.name}={model.folder}"], state=state, environ=environ, logs=state / "logs")


def draw_job(draw: Random, num_items: int, vocab_size: int) -> Job:
    return [
        wire.ScoreItem(
            prompt=draw_tokens(draw, _PROMPT, vocab_size), completion=draw_tokens(draw, _COMPLETION, vocab_size)
        )
        for _ in range(num_items)
    ]


def num_items(engine: Engine, vocab_size: int, seconds: float) -> int:
    """As many as the engine scores in that time, about."""
    jobs = [draw_job(Random(number), 32, vocab_size) for number in range(4)]
    _, *laps = [lap(partial(score, engine, [job]))[0].wall_s for job in jobs]  # the first warms up
    return max(1, round(len(jobs[0]) * seconds / statistics.median(laps)))


def score(engine: Engine, jobs: list[Job]) -> list[float]:
    """All at once, as the worker holds them."""
    groups = [engine.add([_row(item) for item in job]) for job in jobs]
    return [
        sum(value for value in row.columns.logprobs if value is not None) for group in groups for row in group.result()
    ]


def _row(item: wire.ScoreItem) -> Sequence:
    return Sequence(token_ids=[*item.prompt, *item.completion], score_from=len(item.prompt))


def in_process(engine: Engine, jobs: list[Job]) -> Run:
    took, sums = lap(lambda: score(engine, jobs))
    return Run(took.wall_s, took.cpu_s, {"this process": took.cpu_s}, sums)


def through_queue(stack: Stack, client: Client, model: str, jobs: list[Job]) -> Run:
    """Submitted in one request of many jobs; every result is fetched and read."""
    parts = {"client": os.getpid(), "API": stack.pid("api"), "worker": stack.pid(f"worker {model}")}
    if stack.redis is not None and stack.redis.process is not None:
        parts["Redis"] = stack.redis.process.pid
    before = {name: _cpu_s(pid) for name, pid in parts.items()}
    started = time.perf_counter()
    ids = client.submit_many([wire.Score(model=model, items=job) for job in jobs])
    results = [client.result(job_id) for job_id in ids]
    wall_s = time.perf_counter() - started
    shares = {name: _cpu_s(pid) - before[name] for name, pid in parts.items()}
    sums = [scored.logprob_sum or 0.0 for result in results for scored in result.sequences]
    return Run(wall_s, shares["worker"], shares, sums)


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def report(sides: list[tuple[Run, Run]], num_jobs: int) -> None:
    for name, side in (("engine in this process", 0), ("through the queue", 1)):
        runs = [pair[side] for pair in sides]
        wall_s = statistics.median(run.wall_s for run in runs)
        cpu_s = statistics.median(run.engine_cpu_s for run in runs)
        print(
            f"{name:24} wall {wall_s:8.3f} s   {num_jobs / wall_s:8.1f} jobs/s   computing process {cpu_s:8.3f} CPU s"
        )
    queue = [through for _, through in sides]
    shares = {name: statistics.median(run.shares[name] for run in queue) for name in queue[0].shares}
    print("CPU seconds through the queue: " + ", ".join(f"{name} {cpu_s:.2f}" for name, cpu_s in shares.items()))

    def of_rates(seconds: Callable[[Run], float]) -> float:
        return ratio((seconds(alone) for alone, _ in sides), (seconds(through) for _, through in sides))

    print(
        f"ratio of rates, the queue's over the engine's: wall {of_rates(lambda run: run.wall_s):.2f}x, "
        f"worker's CPU {of_rates(lambda run: run.engine_cpu_s):.2f}x"
    )
    difference = max(abs(a - b) for alone, through in sides for a, b in zip(alone.sums, through.sums, strict=True))
    print(f"largest difference of an item: {difference:.1e} nats")
    if difference > _MAX_DIFFERENCE:
        raise SystemExit("the two sides do not agree")


if __name__ == "__main__":
    main()
