"""Run batches whose lines share a few system prompts: a file sorted by prompt, and the same lines shuffled.

    python -m bench.batch_order [--threads 1] [--lines 5000] [--prompts 10] [--prompt-tokens 400]

The CPU time of the worker alone is compared: one that computes a system prompt again for most lines of the shuffled
file needs several times as much for it.
"""

import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil
from transformers import AutoTokenizer

from bench import models
from bench.compare import draw_tokens, make_parser, median_ratio, parse_arguments, print_header
from bench.peers import open_engine
from bench.through_queue import make_stack
from scorepool import Client

_USER, _ANSWER = 12, 4  # tokens of a line's own


@dataclass(frozen=True, slots=True)
class Run:
    """What one batch took."""

    worker_cpu_s: float
    wall_s: float


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--prompts", type=int, default=10, help="different system prompts")
    parser.add_argument("--prompt-tokens", type=int, default=400, help="tokens of a system prompt, about")
    arguments = parse_arguments(parser)
    if arguments.quick:
        arguments.lines, arguments.prompts, arguments.prompt_tokens, arguments.runs = 12, 3, 20, 1

    model = models.find(arguments.model)
    engine = open_engine(model.folder)
    title = f"{arguments.lines} lines, {arguments.prompts} system prompts of about {arguments.prompt_tokens} tokens"
    print_header(f"A batch of {title}", arguments.model, engine.model_info.backend)
    engine.close()
    runs: dict[str, list[Run]] = {"sorted": [], "shuffled": []}
    with tempfile.TemporaryDirectory() as state, make_stack(model, Path(state)) as stack, Client(stack.url) as client:
        worker = psutil.Process(stack.pid(f"worker {model.name}"))
        run_batch(client, worker, draw_lines(Random(0), model, 8, 2, arguments.prompt_tokens))  # warm-up
        for number in range(1, arguments.runs + 1):
            for name in sorted(runs, reverse=bool(number % 2)):  # in turns, so that neither profits from its place
                draw = Random(f"{number} {name}")  # new prompts, so that no cache holds them
                lines = draw_lines(draw, model, arguments.lines, arguments.prompts, arguments.prompt_tokens)
                if name == "shuffled":
                    draw.shuffle(lines)
                runs[name].append(run_batch(client, worker, lines))
                print(f"run {number} {name:9} worker {runs[name][-1].worker_cpu_s:8.2f} CPU s", flush=True)
    print_runs(runs)


def draw_lines(draw: Random, model: models.Model, num_lines: int, num_prompts: int, prompt_tokens: int) -> list[bytes]:
    """Draw the lines of an input file, sorted by system prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model.folder)

    def text(num_tokens: int) -> str:
        return str(tokenizer.decode(draw_tokens(draw, num_tokens, model.vocab_size), skip_special_tokens=True))

    prompts = [text(prompt_tokens) for _ in range(num_prompts)]
    bodies = (
        {
            "model": model.name,
            "messages": [
                {"role": "system", "content": prompts[number * num_prompts // num_lines]},
                {"role": "user", "content": text(_USER)},
            ],
            "max_tokens": _ANSWER,
            "ignore_eos": True,
        }
        for number in range(num_lines)
    )
    lines = (
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(bodies)
    )
    return [json.dumps(line).encode() + b"\n" for line in lines]


def run_batch(client: Client, worker: psutil.Process, lines: list[bytes]) -> Run:
    """Run a batch to its end. Raise SystemExit if a line failed."""
    file = client.upload_file(b"".join(lines))
    before, started = worker.cpu_times(), time.perf_counter()
    batch = client.create_batch(file.id, "/v1/chat/completions")
    batch = client.wait_for_batch(batch.id)
    wall_s, after = time.perf_counter() - started, worker.cpu_times()
    if batch.request_counts.completed != len(lines):
        raise SystemExit(f"the batch is {batch.status}: {batch.request_counts}")
    return Run(after.user + after.system - before.user - before.system, wall_s)


def print_runs(runs: dict[str, list[Run]]) -> None:
    for name, of_name in runs.items():
        cpu_s = statistics.median(run.worker_cpu_s for run in of_name)
        wall_s = statistics.median(run.wall_s for run in of_name)
        print(f"{name:9} worker {cpu_s:8.2f} CPU s   wall {wall_s:8.2f} s")
    ratio = median_ratio(*((run.worker_cpu_s for run in runs[name]) for name in ("shuffled", "sorted")))
    print(f"ratio of the worker's CPU time, shuffled to sorted: {ratio:.2f}x")


if __name__ == "__main__":
    main()
