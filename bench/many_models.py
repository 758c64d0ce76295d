"""Compare models that share one worker process with a worker for each: resident memory, and what a small budget costs.

    python -m bench.many_models [--model wide] [--num 3]

All models are copies of one checkpoint under different names. Alternating score jobs are submitted to a stack at once:
to a worker for each model, to one worker with memory for all, and to one with memory for one, where weights are
loaded by turns. `first` is when the last of the models has ended its first job.
"""

import subprocess
import tempfile
import time
from dataclasses import dataclass
from math import prod
from pathlib import Path
from random import Random

from safetensors import safe_open

from bench import models
from bench.compare import draw_tokens, make_parser, parse_arguments, print_header
from bench.models import Model
from scorepool import Client
from scorepool.local.demo import free_port
from scorepool.local.stack import PRIVATE, Stack
from scorepool.wire import Score, ScoreItem

_MIB = 2**20
ONE_FITS = 14, 10  # of the weights of one model: the budget that holds one of them


@dataclass(frozen=True, slots=True)
class Run:
    """What the workers of one stack took, and the jobs that they computed."""

    rss_bytes: int
    elapsed_s: float
    num_loads: int
    first_s: float
    backend: str


def main() -> None:
    parser = make_parser(__doc__, runs=1)
    parser.add_argument("--num", type=int, default=3, help="models (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=200, help="alternating jobs (default: %(default)s)")
    arguments = parse_arguments(parser)
    num, num_jobs = (2, 12) if arguments.quick else (arguments.num, arguments.jobs)
    model = models.find(arguments.model)
    weights_bytes = count_weights_bytes(model)
    small = {"SCOREPOOL_MEMORY_BYTES": str(weights_bytes * ONE_FITS[0] // ONE_FITS[1])}
    runs = {
        f"{num} workers": measure(model, num, num_jobs, {}, one_worker=False),
        "one worker, memory for all": measure(model, num, num_jobs, {}, one_worker=True),
        "one worker, memory for one": measure(model, num, num_jobs, small, one_worker=True),
    }
    first, *_ = runs.values()
    print_header(f"{num} models, {num_jobs} alternating jobs of a row", arguments.model, first.backend)
    print(f"{'':28} {'RSS MiB':>8} {'ratio':>7} {'s':>7} {'loads':>6} {'first s':>8}")
    for title, run in runs.items():
        rss = f"{run.rss_bytes / _MIB:8.0f} {run.rss_bytes / first.rss_bytes:6.2f}x"
        print(f"{title:28} {rss} {run.elapsed_s:7.1f} {run.num_loads:6} {run.first_s:8.1f}")
    print(f"weights of a model: {weights_bytes / _MIB:.0f} MiB; a turn is 10 s")


def measure(model: Model, num: int, num_jobs: int, environ: dict[str, str], *, one_worker: bool) -> Run:
    """Run a stack of `num` models, and read the memory of its workers after the last job."""
    names = [f"m{index}" for index in range(num)]
    settings = {
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_RESULT_CACHE_BYTES": "0",
        "SCOREPOOL_PREFIX_CACHE_BYTES": "0",
        "SCOREPOOL_MAX_RUNNING_ROWS": "8",
        "SCOREPOOL_DTYPE": "float32",
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder) / "logs"
        specs = [f"{name}={model.folder}" for name in names]
        stack = Stack(
            specs,
            state=Path(folder) / "s",
            environ={**PRIVATE, **settings, **environ},
            logs=logs,
            one_worker=one_worker,
        )
        with stack, Client(stack.url) as client:
            served = client.models()
            started_at = time.monotonic()
            jobs = client.submit_many(_request(names[at % num], at, model) for at in range(num_jobs))
            first_s: dict[str, float] = {}
            for job in client.as_completed(jobs):
                assert job.result is not None, job
                first_s.setdefault(job.model, time.monotonic() - started_at)
            elapsed_s = time.monotonic() - started_at
            workers = [",".join(names)] if one_worker else names
            return Run(
                rss_bytes=sum(resident_bytes(stack.pid(f"worker {name}")) for name in workers),
                elapsed_s=elapsed_s,
                num_loads=sum(log.read_text().count("loaded the weights again") for log in logs.glob("worker-*.log")),
                first_s=max(first_s.values()),
                backend=served[0].stamp.backend,
            )


def count_weights_bytes(model: Model) -> int:
    """Return the memory of the weights in float32."""
    total = 0
    for path in model.folder.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            total += sum(4 * prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def resident_bytes(pid: int) -> int:
    """Return the memory of a process now."""
    shown = subprocess.run(["/bin/ps", "-o", "rss=", "-p", str(pid)], check=True, capture_output=True)
    return int(shown.stdout) * 1024


def _request(name: str, seed: int, model: Model) -> Score:
    token_ids = draw_tokens(Random(seed), 32, model.vocab_size)
    return Score(model=name, items=[ScoreItem(prompt=token_ids[:1], completion=token_ids[1:])])


if __name__ == "__main__":
    main()
