"""Measure a job that computes nothing: scorepool, RQ's SimpleWorker and, if installed, arq, dramatiq and celery.

    python -m bench.job_queue [--jobs 2000] [--runs 3] [--deepest 100000] [--appendfsync always] [--quick]

Each system runs in its own process, in turns, and medians are printed. scorepool does everything that a job of the API
needs: it decodes the request, writes a result and wakes the client that waits. The peers run a function that returns
None. Rate and CPU time are the worker's alone, from its first job to its last.

Then follow Redis's memory per job by queue depth, and the time from a submission to the client's wake-up.
"""

import argparse
import asyncio
import importlib.util
import json
import logging
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from uuid import uuid4

import redis
import redis.asyncio
from rq.utils import as_text

from bench.queue_systems import IN_FLIGHT, OPTIONAL, SYSTEMS, NoopWorker, make_request, samples, submit
from scorepool import store, wire
from scorepool.api.auth import Keyring
from scorepool.api.repositories.event_reader import EventReader
from scorepool.api.repositories.queue import Queue
from scorepool.api.repositories.waiting import Waiting
from scorepool.local.redis_server import RedisServer

ROOT = Path(__file__).parent.parent


def python_command(call: str) -> list[str]:
    """Return a command that makes a call in a new process, from `job_queue` or `queue_systems`."""
    return [sys.executable, "-c", f"from bench import job_queue, queue_systems; {call}"]


def compare(server: RedisServer, num_jobs: int, num_runs: int) -> None:
    names = [name for name in SYSTEMS if name not in OPTIONAL or importlib.util.find_spec(name)]
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(num_runs):
        for name in names:
            redis.Redis.from_url(server.url).flushall()
            call = f"queue_systems.run_system({name!r}, {server.url!r}, {num_jobs})"
            try:
                done = subprocess.run(
                    python_command(call), stdout=subprocess.PIPE, text=True, timeout=60, cwd=ROOT, check=True
                )
            except subprocess.SubprocessError as error:
                print(f"{name}: {error}")
            else:
                measured[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{num_jobs} no-op jobs, {IN_FLIGHT} in flight if the worker can; medians of {num_runs} runs")
    print(f"{'':18}{'jobs/s':>9}{'CPU ms/job':>12}{'round trips/job':>17}{'ratio':>10}")
    own_rate = statistics.median(run["rate"] for run in measured["scorepool"])
    for name, runs in measured.items():
        if runs:
            rate, cpu_ms, round_trips = (
                statistics.median(run[key] for run in runs) for key in ("rate", "cpu_ms", "round_trips")
            )
            print(f"{name:18}{rate:9.0f}{cpu_ms:12.2f}{round_trips:17.2f}{own_rate / rate:9.2f}x")


def used_bytes(connection: "redis.Redis") -> int:
    return int(connection.info("memory")["used_memory"])


def measure_memory(url: str, deepest: int) -> None:
    """Print the bytes per queued job and per stored result, and the rate of the worker, at growing queue depths."""
    logging.disable(logging.ERROR)
    connection = redis.Redis.from_url(url)
    print("\nRedis memory: requests of 1,000 token ids with results of 1,000 tokens, then jobs of one token")
    for num_tokens, depths in ((1000, (1_000, 10_000)), (1, (1_000, 10_000, 100_000, 1_000_000))):
        connection.execute_command("FLUSHALL", "SYNC")
        num_queued = 0
        for depth in depths:
            if depth > deepest:
                break
            before, num_new = used_bytes(connection), depth - num_queued
            asyncio.run(submit(url, num_new, num_tokens))
            num_queued = depth
            queued = (used_bytes(connection) - before) / num_new
            samples.clear()
            NoopWorker.num_tokens = num_tokens
            before = used_bytes(connection)
            worker = NoopWorker(["demo"], connection=connection)
            worker.work(burst=True, logging_level="ERROR", max_jobs=1000)
            num_queued -= 1000
            finished = queued + (used_bytes(connection) - before) / 1000
            rate = len(samples) / (samples[-1][0] - samples[0][0])
            print(
                f"{num_tokens:5} tokens, {depth:7} queued: {queued:7.0f} bytes a queued job, "
                f"{finished:7.0f} a finished job, {rate:6.0f} jobs/s"
            )


def measure_wake_up(server: RedisServer, num_waiters: int, num_jobs: int) -> None:
    """Print the time from submission to the client's wake-up, through a live worker, while other clients wait too."""
    with subprocess.Popen(python_command(f"queue_systems.serve({server.url!r})"), cwd=ROOT) as worker:
        try:
            latencies_s = sorted(asyncio.run(_wake_up_latencies(server.url, num_waiters, num_jobs)))
        finally:
            worker.terminate()
    p50, p99 = latencies_s[len(latencies_s) // 2], latencies_s[int(len(latencies_s) * 0.99)]
    print(f"\nsubmission to wake-up, {num_waiters} waiting, 100 jobs/s: p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms")


async def _wake_up_latencies(url: str, num_waiters: int, num_jobs: int) -> list[float]:
    connection, stream = redis.asyncio.Redis.from_url(url), redis.asyncio.Redis.from_url(url)
    queue = Queue(connection, store.Settings(), Keyring([]).weight, False)
    waiting = Waiting([EventReader(stream, connection)], on_ended=lambda count: None)
    waiting.start()

    async def read(job_id: str) -> tuple[wire.Job, float]:
        status = as_text(await connection.hget(f"rq:job:{job_id}", "status") or b"queued")
        job = wire.Job(id=job_id, kind="score", model="demo", status=status, created_at=0.0)  # type: ignore[arg-type]
        return job, math.inf

    async def submit_and_wait() -> float:
        job_id = uuid4().hex
        started_at = time.perf_counter()
        await queue.submit("bench", [make_request(1)], [job_id])
        await waiting.until_ended(job_id, lambda: read(job_id), 30.0)
        return time.perf_counter() - started_at

    others = [
        asyncio.create_task(waiting.until_ended(uuid4().hex, lambda: read("none"), 600.0)) for _ in range(num_waiters)
    ]
    while not await connection.exists("rq:workers"):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)
    jobs = []
    for _ in range(num_jobs):
        jobs.append(asyncio.create_task(submit_and_wait()))
        await asyncio.sleep(0.01)
    latencies_s = await asyncio.gather(*jobs)
    for other in others:
        other.cancel()
    await waiting.close()
    await stream.aclose()
    await connection.aclose()
    return latencies_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2000, help="jobs of each run (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each system (default: %(default)s)")
    parser.add_argument(
        "--deepest",
        type=int,
        default=100_000,
        help="deepest queue whose memory is measured; 1000000 takes minutes and 2 GB (default: %(default)s)",
    )
    parser.add_argument("--appendfsync", default="everysec", help="everysec or always (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few jobs and one run, to check that everything works")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    fsync = arguments.appendfsync
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder) / "r", appendfsync=fsync) as server:
        compare(server, 100 if arguments.quick else arguments.jobs, 1 if arguments.quick else arguments.runs)
        deepest = 1_000 if arguments.quick else arguments.deepest
        subprocess.run(python_command(f"job_queue.measure_memory({server.url!r}, {deepest})"), cwd=ROOT, check=True)
    # A new server: the other one still writes a million jobs to its file.
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder) / "r", appendfsync=fsync) as server:
        measure_wake_up(server, *((100, 20) if arguments.quick else (1000, 500)))


if __name__ == "__main__":
    main()
