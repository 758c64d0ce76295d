"""Compare jobs that the result cache has, jobs that it does not have, and jobs that do not ask it.

    python -m bench.result_cache [--model demo] [--jobs 1000] [--tokens 64]

All run through one stack in turns, each turn in another order, so that a busy machine slows all of them alike. A miss
costs a lookup and a written entry: its ratio to a job that does not ask is the price for who never hits.
"""

import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from bench import models
from bench.compare import draw_tokens, make_parser, median_ratio, parse_arguments, print_header
from bench.through_queue import Run, run_requests
from scorepool import Client, wire
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack

SYSTEMS = ("not asked", "miss", "hit")


@dataclass(slots=True)
class Measured:
    """The runs of one system, and how many of its sequences the cache gave."""

    runs: list[Run] = field(default_factory=list)
    num_cached: int = 0


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=1000, help="jobs of one item each, all in flight at once")
    parser.add_argument("--tokens", type=int, default=64, help="of an item, a quarter of them scored")
    arguments = parse_arguments(parser)
    if arguments.quick:
        arguments.jobs, arguments.runs = 20, 1
    model = models.find(arguments.model)
    measured = {name: Measured() for name in SYSTEMS}
    draw = Random(0)
    with tempfile.TemporaryDirectory() as state, make_stack(model, Path(state)) as stack, Client(stack.url) as client:
        stamp = client.models()[0].stamp
        print_header(
            f"Result cache, {arguments.jobs} jobs of {arguments.tokens} tokens", arguments.model, stamp.backend
        )
        run_requests(stack, client, model.name, requests_of(draw, model, 20, arguments.tokens, cache=False))
        for number in range(arguments.runs):
            fresh = requests_of(draw, model, arguments.jobs, arguments.tokens, cache=True)
            other = requests_of(draw, model, arguments.jobs, arguments.tokens, cache=False)
            turns = [("not asked", other), ("miss", fresh)]
            for name, requests in [*(turns if number % 2 == 0 else reversed(turns)), ("hit", fresh)]:
                run = run_requests(stack, client, model.name, requests)
                measured[name].runs.append(run)
                measured[name].num_cached += run.num_cached
    print_measured(measured, arguments.jobs)


def make_stack(model: models.Model, state: Path) -> Stack:
    environ = {
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_DTYPE": "float32",
        "SCOREPOOL_RESULT_CACHE_BYTES": str(2**27),
    }
    return Stack([f"{model.name}={model.folder}"], state=state, environ=environ, logs=state / "logs")


def requests_of(draw: Random, model: models.Model, count: int, num_tokens: int, cache: bool) -> list[wire.Score]:
    num_scored = max(1, num_tokens // 4)
    return [
        wire.Score(
            model=model.name,
            items=[
                wire.ScoreItem(
                    prompt=draw_tokens(draw, num_tokens - num_scored, model.vocab_size),
                    completion=draw_tokens(draw, num_scored, model.vocab_size),
                )
            ],
            cache=cache,
        )
        for _ in range(count)
    ]


def print_measured(measured: dict[str, Measured], num_jobs: int) -> None:
    for name, one in measured.items():
        wall_s = statistics.median(run.wall_s for run in one.runs)
        cpu_s = statistics.median(run.engine_cpu_s for run in one.runs)
        print(
            f"{name:10} wall {wall_s:7.3f} s   {num_jobs / wall_s:8.1f} jobs/s   worker {cpu_s:7.3f} CPU s   "
            f"{one.num_cached} of {num_jobs * len(one.runs)} from the cache"
        )
    base = measured["not asked"].runs
    for name in SYSTEMS[1:]:
        wall = median_ratio((run.wall_s for run in measured[name].runs), (run.wall_s for run in base))
        cpu = median_ratio((run.engine_cpu_s for run in measured[name].runs), (run.engine_cpu_s for run in base))
        print(f"ratio of times, {name} to not asked: wall {wall:.2f}x, worker's CPU {cpu:.2f}x")
    hits, misses = measured["hit"], measured["miss"]
    if hits.num_cached != num_jobs * len(hits.runs) or misses.num_cached:
        raise SystemExit("the cache did not give what it should")
    if any(one.sums != other.sums for one, other in zip(hits.runs, misses.runs, strict=True)):
        raise SystemExit("results from the cache are not those that were computed")


if __name__ == "__main__":
    main()
