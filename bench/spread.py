"""Measure jobs that compute nothing, of two models on one Redis server, and of the same models on a server each.

    python -m bench.spread [--jobs 10000] [--runs 3] [--appendfsync always] [--quick]

Each model has a worker process. The jobs are queued before the workers start, and the rate is from the first job to the
last. The layouts take turns, and medians are printed.

With few cores the workers are the limit and not Redis: two servers then end as many jobs a second as one. What a second
server gives is in the last column: Redis runs its scripts on one core, so a server can end no more than one job in the
CPU time that a job costs it, and the sum of the servers' limits is what workers on other machines could use.
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import redis

from bench.fleet_simulation.costs import Meter
from bench.queue_systems import NoopWorker, samples, submit
from scorepool.local.redis_server import RedisServer

ROOT = Path(__file__).parent.parent
MODELS = ("a", "b")


def work(url: str, model: str) -> None:
    """Run all jobs of a model in this process, and print when the first and the last ended, and the CPU seconds.

    It begins when it reads a line, so that all workers begin together.
    """
    logging.disable(logging.ERROR)
    worker = NoopWorker([model], connection=redis.Redis.from_url(url))
    print("ready", flush=True)
    sys.stdin.readline()
    worker.work(burst=True, logging_level="ERROR")
    (first_at, cpu_before, _), (last_at, cpu_after, _) = samples[0], samples[-1]
    print(json.dumps([first_at, last_at, cpu_after - cpu_before]), flush=True)
    os._exit(0)


def run(urls: Sequence[str], num_jobs: int) -> dict[str, float]:
    """Run `num_jobs` jobs, a half of each model; `urls` has the server of each model."""
    servers = {url: redis.Redis.from_url(url) for url in urls}
    for server in servers.values():
        server.flushall()
    meters = [Meter(server) for server in servers.values()]
    before = [meter.read_s() for meter in meters]
    for model, url in zip(MODELS, urls, strict=True):
        asyncio.run(submit(url, num_jobs // 2, model=model))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"from bench import spread; spread.work({url!r}, {model!r})"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for model, url in zip(MODELS, urls, strict=True)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    ends = [json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in processes]
    cpu_s = [meter.read_s() - start for meter, start in zip(meters, before, strict=True)]
    wall_s = max(last for _, last, _ in ends) - min(first for first, _, _ in ends)
    jobs_per_server = num_jobs / len(servers)
    return {
        "rate": num_jobs / wall_s,
        "worker_ms": sum(cpu for _, _, cpu in ends) / num_jobs * 1e3,
        "redis_ms": sum(cpu_s) / num_jobs * 1e3,
        "limit": sum(jobs_per_server / each for each in cpu_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10000, help="jobs of each run (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each layout (default: %(default)s)")
    parser.add_argument("--appendfsync", default="everysec", help="everysec or always (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few jobs and one run, to check that everything works")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    num_jobs, num_runs = (200, 1) if arguments.quick else (arguments.jobs, arguments.runs)
    with ExitStack() as stack:
        urls = []
        for _ in MODELS:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            urls.append(stack.enter_context(RedisServer(folder / "r", appendfsync=arguments.appendfsync)).url)
        layouts = {"one server": [urls[0], urls[0]], "two servers": urls}
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in layouts}
        for _ in range(num_runs):
            for name, of_models in layouts.items():
                measured[name].append(run(of_models, num_jobs))
    print(f"{num_jobs} no-op jobs of two models, a worker each, {os.cpu_count()} cores; medians of {num_runs} runs")
    print(f"{'':12}{'jobs/s':>9}{'ratio':>8}{'worker ms/job':>15}{'Redis ms/job':>14}{'limit of Redis, jobs/s':>24}")
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in measured.items()
    }
    for name, found in medians.items():
        ratio = found["rate"] / medians["one server"]["rate"]
        print(
            f"{name:12}{found['rate']:9.0f}{ratio:7.2f}x{found['worker_ms']:15.2f}{found['redis_ms']:14.3f}"
            f"{found['limit']:24.0f}"
        )


if __name__ == "__main__":
    main()
