"""Compare jobs through HTTP, Redis and a worker with the same sequences in an engine in this process.

    python -m bench.through_queue [--model demo] [--jobs 40] [--small-jobs 1000] [--job-s 0.2]

Client, API, Redis and worker are separate processes that share the machine's cores. So the CPU time of the worker alone
is shown beside the wall clock: on a Mac, whose GPU computes, it is what limits the rate.
"""

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import psutil

from bench import models
from bench.compare import draw_tokens, make_parser, median_ratio, parse_arguments, print_header, time_call
from bench.peers import open_engine
from scorepool import Client, wire
from scorepool.engine import Engine, Sequence
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack

_PROMPT, _COMPLETION = 48, 16  # tokens of an item
_MAX_DIFFERENCE = 1e-3  # nats: the two ways batch the sequences differently

Job = list[wire.ScoreItem]


@dataclass(frozen=True, slots=True)
class Run:
    wall_s: float
    engine_cpu_s: float  # of the process that computes
    cpu_s_by_process: dict[str, float]
    sums: list[float]  # log p of each item
    num_cached: int = 0  # items that the result cache gave


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=40, help="jobs of about --job-s each")
    parser.add_argument("--job-s", type=float, default=0.2, help="seconds that the engine needs for a job")
    parser.add_argument("--small-jobs", type=int, default=1000, help="jobs of one item each, all in flight at once")
    arguments = parse_arguments(parser)
    if arguments.quick:
        arguments.jobs, arguments.small_jobs, arguments.job_s, arguments.runs = 3, 20, 0.02, 1

    model = models.find(arguments.model)
    engine = open_engine(model.folder)
    draw = Random(0)
    items_per_job = num_items(engine, model.vocab_size, arguments.job_s)
    with tempfile.TemporaryDirectory() as state, make_stack(model, Path(state)) as stack, Client(stack.url) as client:
        for title, count, size in (
            (f"jobs of {items_per_job} items, about {arguments.job_s} s each", arguments.jobs, items_per_job),
            ("small jobs of one item, all in flight", arguments.small_jobs, 1),
        ):
            print_header(f"Through the queue, {count} {title}", arguments.model, engine.model_info.backend)
            run_through_queue(stack, client, arguments.model, [draw_job(draw, size, model.vocab_size)])  # warm-up
            pairs: list[tuple[Run, Run]] = []
            for _ in range(arguments.runs):  # each with new prompts, so that no cache holds them
                jobs = [draw_job(draw, size, model.vocab_size) for _ in range(count)]
                direct = run_in_process(engine, jobs)
                pairs.append((direct, run_through_queue(stack, client, arguments.model, jobs)))
            print_runs(pairs, count)
    engine.close()


def make_stack(model: models.Model, state: Path) -> Stack:
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
    """Return about how many items the engine scores in that time."""
    jobs = [draw_job(Random(number), 32, vocab_size) for number in range(4)]
    _, *times = [time_call(partial(score, engine, [job]))[0].wall_s for job in jobs]  # the first is a warm-up
    return max(1, round(len(jobs[0]) * seconds / statistics.median(times)))


def score(engine: Engine, jobs: list[Job]) -> list[float]:
    """Add all jobs at once, as a worker does, and return the log p of each item."""
    groups = [engine.add([to_sequence(item) for item in job]) for job in jobs]
    sequences = [sequence for group in groups for sequence in group.result()]
    return [sum(value for value in sequence.columns.logprobs if value is not None) for sequence in sequences]


def to_sequence(item: wire.ScoreItem) -> Sequence:
    assert isinstance(item.prompt, list)
    assert isinstance(item.completion, list)
    return Sequence(token_ids=[*item.prompt, *item.completion], score_from=len(item.prompt))


def run_in_process(engine: Engine, jobs: list[Job]) -> Run:
    timing, sums = time_call(lambda: score(engine, jobs))
    return Run(timing.wall_s, timing.cpu_s, {"this process": timing.cpu_s}, sums)


def run_through_queue(stack: Stack, client: Client, model: str, jobs: list[Job]) -> Run:
    return run_requests(stack, client, model, [wire.Score(model=model, items=job) for job in jobs])


def run_requests(stack: Stack, client: Client, model: str, requests: list[wire.Score]) -> Run:
    """Submit all jobs in one request, then fetch and decode every result."""
    pids = {"client": os.getpid(), "API": stack.pid("api"), "worker": stack.pid(f"worker {model}")}
    if stack.redis is not None and stack.redis.process is not None:
        pids["Redis"] = stack.redis.process.pid
    before = {name: _cpu_s(pid) for name, pid in pids.items()}
    started = time.perf_counter()
    job_ids = client.submit_many(requests)
    results = [job.result for job in client.in_order(job_ids) if job.result is not None]
    wall_s = time.perf_counter() - started
    cpu_s = {name: _cpu_s(pid) - before[name] for name, pid in pids.items()}
    sums = [scored.logprob_sum or 0.0 for result in results for scored in result.sequences]
    num_cached = sum(result.stamp.cached_items for result in results)
    return Run(wall_s, cpu_s["worker"], cpu_s, sums, num_cached)


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def print_runs(pairs: list[tuple[Run, Run]], num_jobs: int) -> None:
    direct, queued = [first for first, _ in pairs], [second for _, second in pairs]
    for name, runs in (("engine in this process", direct), ("through the queue", queued)):
        wall_s = statistics.median(run.wall_s for run in runs)
        cpu_s = statistics.median(run.engine_cpu_s for run in runs)
        print(
            f"{name:24} wall {wall_s:8.3f} s   {num_jobs / wall_s:8.1f} jobs/s   computing process {cpu_s:8.3f} CPU s"
        )
    processes = list(queued[0].cpu_s_by_process)
    medians = {name: statistics.median(run.cpu_s_by_process[name] for run in queued) for name in processes}
    print("CPU seconds through the queue: " + ", ".join(f"{name} {cpu_s:.2f}" for name, cpu_s in medians.items()))
    wall_ratio = median_ratio((run.wall_s for run in direct), (run.wall_s for run in queued))
    cpu_ratio = median_ratio((run.engine_cpu_s for run in direct), (run.engine_cpu_s for run in queued))
    print(f"ratio of rates, queue to engine: wall {wall_ratio:.2f}x, worker's CPU {cpu_ratio:.2f}x")
    difference = max(abs(a - b) for one, two in pairs for a, b in zip(one.sums, two.sums, strict=True))
    print(f"largest difference of an item: {difference:.1e} nats")
    if difference > _MAX_DIFFERENCE:
        raise SystemExit("the scores of the engine and of the queue do not agree")


if __name__ == "__main__":
    main()
