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
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import redis
import redis.asyncio
import rq
from rq.serializers import JSONSerializer
from rq.utils import as_text

from scorepool import store, wire
from scorepool.api.auth import Keyring
from scorepool.api.repositories.queue import Queue
from scorepool.api.repositories.waiting import Waiting
from scorepool.local.redis_server import RedisServer
from scorepool.worker.rq.worker import Worker

ROOT = Path(__file__).parent.parent
IN_FLIGHT = 32
STAMP = wire.Provenance(
    model="demo",
    fingerprint="f",
    dtype="float32",
    quantization=None,
    adapter=None,
    mode="default",
    backend="",
    versions={},
)
samples: list[tuple[float, float, int]] = []  # at each job of this process: clock, CPU seconds, messages to Redis
num_sent = 0


def noop() -> None:
    """Do the work of a job: nothing but a sample."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    samples.append((time.perf_counter(), usage.ru_utime + usage.ru_stime, num_sent))


def make_result(num_tokens: int) -> wire.Result:
    scored = wire.SequenceResult(
        token_ids=list(range(num_tokens)),
        token_bytes=[b"word"] * num_tokens,
        text="word" * num_tokens,
        logprobs=wire.Floats([-0.5] * num_tokens),
    )
    return wire.Result(
        sequences=[scored],
        temperature=1.0,
        usage=wire.Usage(prompt_tokens=0, completion_tokens=num_tokens),
        stamp=STAMP,
    )


def make_request(num_tokens: int) -> wire.Score:
    item = wire.ScoreItem(prompt=[1], completion=list(range(num_tokens)))
    return wire.Score(model="demo", items=[item], wait_for_model=True)


class NoopWorker(Worker):
    """scorepool's worker without an engine."""

    capacity = IN_FLIGHT
    num_tokens = 1

    def open(self) -> None:
        answer = make_result(self.num_tokens)

        def run(job: object) -> wire.Result:
            noop()
            return answer

        self.functions[store.INFER] = run


async def submit(url: str, num_jobs: int, num_tokens: int = 1) -> None:
    async with redis.asyncio.Redis.from_url(url) as connection:
        queue = Queue(connection, store.Settings(max_queue_depth=10**7), Keyring([]).weight, False)
        for start in range(0, num_jobs, 500):
            count = min(500, num_jobs - start)
            await queue.submit("bench", [make_request(num_tokens)] * count, [uuid4().hex for _ in range(count)])


# One function per system: it puts the jobs on a queue, then runs them all in this process.


def run_scorepool(url: str, num_jobs: int) -> None:
    asyncio.run(submit(url, num_jobs))
    NoopWorker(["demo"], connection=redis.Redis.from_url(url)).work(burst=True, logging_level="ERROR")


def run_rq(url: str, num_jobs: int) -> None:
    connection = redis.Redis.from_url(url)
    queue = rq.Queue("plain", connection=connection, serializer=JSONSerializer)
    queue.enqueue_many([rq.Queue.prepare_data("bench.job_queue.noop") for _ in range(num_jobs)])
    rq.SimpleWorker([queue], connection=connection, serializer=JSONSerializer).work(burst=True, logging_level="ERROR")


def run_arq(url: str, num_jobs: int) -> None:
    from arq.connections import ArqRedis
    from arq.worker import Worker as ArqWorker
    from arq.worker import func

    async def run(ctx: object) -> None:
        noop()

    async def main() -> None:
        pool = ArqRedis(redis.asyncio.ConnectionPool.from_url(url))
        for _ in range(num_jobs):
            await pool.enqueue_job("run")
        runs = [func(run, name="run")]
        await ArqWorker(runs, redis_pool=pool, burst=True, max_jobs=IN_FLIGHT, poll_delay=0.01).async_run()

    asyncio.run(main())


def run_dramatiq(url: str, num_jobs: int) -> None:
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    broker = RedisBroker(client=redis.Redis.from_url(url), middleware=[])
    dramatiq.set_broker(broker)
    actor = dramatiq.actor(noop)
    for _ in range(num_jobs):
        actor.send()
    worker = dramatiq.Worker(broker, worker_threads=8)
    worker.start()
    wait_for_jobs(num_jobs)
    worker.stop()


def run_celery(url: str, num_jobs: int) -> None:
    from celery import Celery

    app = Celery("bench", broker=url.replace("unix://", "redis+socket://"))
    app.conf.worker_prefetch_multiplier = 4
    task = app.task(noop, ignore_result=True, name="noop")
    for _ in range(num_jobs):
        task.delay()

    def shut_down() -> None:
        wait_for_jobs(num_jobs)
        app.control.shutdown()

    threading.Thread(target=shut_down).start()
    app.conf.worker_redirect_stdouts = False
    with suppress(SystemExit):
        app.worker_main(["worker", "--pool=threads", f"--concurrency={IN_FLIGHT}", "--loglevel=ERROR"])


def python_command(call: str) -> list[str]:
    """Return a command that imports this file as a module, so that jobs that name its functions see its `samples`."""
    return [sys.executable, "-c", f"from bench import job_queue; {call}"]


def serve(url: str) -> None:
    NoopWorker(["demo"], connection=redis.Redis.from_url(url)).work(logging_level="ERROR")


def wait_for_jobs(num_jobs: int) -> None:
    while len(samples) < num_jobs:
        time.sleep(0.01)


SYSTEMS: dict[str, Callable[[str, int], None]] = {
    "scorepool": run_scorepool,
    "rq SimpleWorker": run_rq,
    "arq": run_arq,
    "dramatiq": run_dramatiq,
    "celery": run_celery,
}
OPTIONAL = {"arq", "dramatiq", "celery"}  # measured if installed


def count_messages() -> None:
    """Count the messages to Redis. Each is one round trip, whether it holds one command or a pipeline."""

    def with_count(send: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            global num_sent
            num_sent += 1
            return send(*args, **kwargs)

        return count

    for connection in (redis.connection.AbstractConnection, redis.asyncio.connection.AbstractConnection):
        connection.send_packed_command = with_count(connection.send_packed_command)  # type: ignore[method-assign]


def run_system(name: str, url: str, num_jobs: int) -> None:
    """Run one system in this process, and print its figures as the last line, as JSON."""
    count_messages()
    SYSTEMS[name](url, num_jobs)
    (started_at, cpu_before, sent_before), (ended_at, cpu_after, sent_after) = samples[0], samples[-1]
    numbers = {
        "rate": num_jobs / (ended_at - started_at),
        "cpu_ms": (cpu_after - cpu_before) / num_jobs * 1e3,
        "round_trips": (sent_after - sent_before) / num_jobs,
    }
    print(json.dumps(numbers), flush=True)
    os._exit(0)  # some systems leave threads behind


def compare(server: RedisServer, num_jobs: int, num_runs: int) -> None:
    names = [name for name in SYSTEMS if name not in OPTIONAL or importlib.util.find_spec(name)]
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(num_runs):
        for name in names:
            redis.Redis.from_url(server.url).flushall()
            call = f"job_queue.run_system({name!r}, {server.url!r}, {num_jobs})"
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
    with subprocess.Popen(python_command(f"job_queue.serve({server.url!r})"), cwd=ROOT) as worker:
        try:
            latencies_s = sorted(asyncio.run(_wake_up_latencies(server.url, num_waiters, num_jobs)))
        finally:
            worker.terminate()
    p50, p99 = latencies_s[len(latencies_s) // 2], latencies_s[int(len(latencies_s) * 0.99)]
    print(f"\nsubmission to wake-up, {num_waiters} waiting, 100 jobs/s: p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms")


async def _wake_up_latencies(url: str, num_waiters: int, num_jobs: int) -> list[float]:
    connection, stream = redis.asyncio.Redis.from_url(url), redis.asyncio.Redis.from_url(url)
    queue = Queue(connection, store.Settings(), Keyring([]).weight, False)
    waiting = Waiting(stream, connection, on_ended=lambda count: None)
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
