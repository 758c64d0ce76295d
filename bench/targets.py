"""Compare the processor time of a worker for the caller's token ids with that for none and for the most likely ones.

    python -m bench.targets [--rows 1000] [--ids 242] [--runs 5]

All in one process: a score job is translated, computed and packed for Redis, as a worker does. The ways take turns in
each run, so that other work on the machine costs all of them alike; ratios are medians of the runs' own ratios.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from scorepool import wire
from scorepool.engine import Engine, EngineSettings
from scorepool.worker.inference.provenance import provenance_of
from scorepool.worker.inference.result import to_result
from scorepool.worker.inference.translate import to_sequences

DEMO = Path(__file__).parents[1] / "scorepool" / "models" / "demo"
ROWS_PER_JOB = 200  # so that a job holds 1,024 top logprobs of each token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=100, help="tokens of each prompt")
    parser.add_argument("--ids", type=int, default=242, help="target ids")
    parser.add_argument("--tokens", type=int, default=20, help="of each completion")
    parser.add_argument("--tops", type=int, nargs="*", default=[20, 64, 242, 1024], help="most likely tokens")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a small size, to try it out")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.runs = 20, 1
    engine = Engine(EngineSettings(model=arguments.model, prefix_cache_bytes=0))  # every run computes all tokens
    try:
        compare(engine, arguments)
    finally:
        engine.close()


def compare(engine: Engine, arguments: argparse.Namespace) -> None:
    """Measure every way in turns, and print the ratios to none."""
    draw = random.Random(0)
    vocab_size = engine.model_info.vocab_size
    items = [
        wire.ScoreItem(
            prompt=draw.choices(range(5, vocab_size), k=arguments.prompt),
            completion=draw.choices(range(5, vocab_size), k=arguments.tokens),
        )
        for _ in range(arguments.rows)
    ]
    targets = draw.sample(range(vocab_size), arguments.ids)
    ways: dict[str, dict[str, Any]] = {"nothing": {}, f"{arguments.ids} targets": {"targets": targets}}
    ways |= {f"top {top}": {"top_logprobs": top} for top in arguments.tops if top <= vocab_size}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    starts = range(0, arguments.rows, ROWS_PER_JOB)
    parts = [items[start : start + ROWS_PER_JOB] for start in starts]
    jobs = {
        name: [wire.Score(model="bench", items=part, packed=True, **way) for part in parts]
        for name, way in ways.items()
    }
    run(engine, jobs["nothing"][0])
    for number in range(arguments.runs):
        order = list(jobs) if number % 2 else list(reversed(jobs))
        for name in order:
            seconds[name].append(sum(run(engine, job) for job in jobs[name]))
    sizes = f"{arguments.rows} rows of {arguments.prompt} + {arguments.tokens} tokens"
    print(f"{sizes}, vocabulary of {vocab_size}; ratios to nothing")
    for name, each in seconds.items():
        ratios = [one / none for one, none in zip(each, seconds["nothing"], strict=True)]
        percent = 100 * statistics.median(ratios)
        print(f"{name:12} {statistics.median(each):7.2f} s of processor time, ratio {percent:.1f}%")


def run(engine: Engine, request: wire.Score) -> float:
    """Return the seconds of processor time that a job takes, from its request to the bytes of its result."""
    began_at = time.process_time()
    steps = to_sequences(request, engine.chat, engine.model_info.context_length, "bench")
    try:
        while True:
            next(steps)
    except StopIteration as stop:
        prepared = stop.value
    engine.add([each.sequence for each in prepared]).result()
    wire.encode(to_result(request, prepared, engine.chat, provenance_of("bench", engine.model_info)))
    return time.process_time() - began_at


if __name__ == "__main__":
    main()
