"""What a job costs that computes nothing: ours beside RQ's SimpleWorker and, where installed, arq, dramatiq, celery.

    python -m bench.job_queue [--jobs 2000] [--runs 3] [--deepest 100000] [--appendfsync always] [--quick]

Each contender runs in a process of its own, one after the other, several rounds; the numbers are medians. Ours takes
the whole way of a job of the API: its request is read, a result is written, and who waits is told. Peers run a function
that returns None. Rate and CPU are of the worker alone, from its first job to its last.
"""

import argparse
import asyncio
import importlib.util
import json
import logging
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
from scorepool.api.repositories.queue import Queue as Submitter
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
marks: list[tuple[float, float, int]] = []  # at each job of this process: clock, CPU seconds, messages sent to Redis
num_sent = 0


def noop() -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    marks.append((time.perf_counter(), usage.ru_utime + usage.ru_stime, num_sent))


def result(num_tokens: int) -> wire.Result:
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


def request(num_tokens: int) -> wire.Score:
    item = wire.ScoreItem(prompt=[1], completion=list(range(num_tokens)))
    return wire.Score(model="demo", items=[item], wait_for_model=True)


class NoopWorker(Worker):
    """Everything of ours but the engine."""

    capacity = IN_FLIGHT
    num_tokens = 1

    def open(self) -> None:
        answer = result(self.num_tokens)

        def run(job: object) -> wire.Result:
            noop()
            return answer

        self.functions[store.INFER] = run


async def submit(url: str, num_jobs: int, num_tokens: int = 1) -> None:
    async with redis.asyncio.Redis.from_url(url) as connection:
        queue = Submitter(connection, store.Settings(max_queue_depth=10**7), Keyring([]))
        for start in range(0, num_jobs, 500):
            count = min(500, num_jobs - start)
            await queue.submit("bench", [request(num_tokens)] * count, [uuid4().hex for _ in range(count)])


# One function a contender: put the jobs on their queue, then run them all in this process.


def ours(url: str, num_jobs: int) -> None:
    asyncio.run(submit(url, num_jobs))
    NoopWorker(["demo"], connection=redis.Redis.from_url(url)).work(burst=True, logging_level="ERROR")


def rq_simple_worker(url: str, num_jobs: int) -> None:
    connection = redis.Redis.from_url(url)
    queue = rq.Queue("plain", connection=connection, serializer=JSONSerializer)
    queue.enqueue_many([rq.Queue.prepare_data("bench.job_queue.noop") for _ in range(num_jobs)])
    rq.SimpleWorker([queue], connection=connection, serializer=JSONSerializer).work(burst=True, logging_level="ERROR")


def arq(url: str, num_jobs: int) -> None:
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


def dramatiq(url: str, num_jobs: int) -> None:
    import dramatiq as library
    from dramatiq.brokers.redis import RedisBroker

    broker = RedisBroker(client=redis.Redis.from_url(url), middleware=[])
    library.set_broker(broker)
    actor = library.actor(noop)
    for _ in range(num_jobs):
        actor.send()
    worker = library.Worker(broker, worker_threads=8)
    worker.start()
    wait(num_jobs)
    worker.stop()


def celery(url: str, num_jobs: int) -> None:
    from celery import Celery

    app = Celery("bench", broker=url.replace("unix://", "redis+socket://"))
    app.conf.worker_prefetch_multiplier = 4
    task = app.task(noop, ignore_result=True, name="noop")
    for _ in range(num_jobs):
        task.delay()

    def leave() -> None:
        wait(num_jobs)
        app.control.shutdown()

    threading.Thread(target=leave).start()
    app.conf.worker_redirect_stdouts = False
    with suppress(SystemExit):
        app.worker_main(["worker", "--pool=threads", f"--concurrency={IN_FLIGHT}", "--loglevel=ERROR"])


def command(call: str) -> list[str]:
    """A process that imports this file as a module, so that jobs that name its functions meet the same `marks`."""
    return [sys.executable, "-c", f"from bench import job_queue; {call}"]


def serve(url: str) -> None:
    NoopWorker(["demo"], connection=redis.Redis.from_url(url)).work(logging_level="ERROR")


def wait(num_jobs: int) -> None:
    while len(marks) < num_jobs:
        time.sleep(0.01)


CONTENDERS = {"ours": ours, "rq SimpleWorker": rq_simple_worker, "arq": arq, "dramatiq": dramatiq, "celery": celery}


def count_messages() -> None:
    """Every message to Redis, be it one command or a pipeline, is one round trip."""

    def counted(send: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            global num_sent
            num_sent += 1
            return send(*args, **kwargs)

        return count

    for connection in (redis.connection.AbstractConnection, redis.asyncio.connection.AbstractConnection):
        connection.send_packed_command = counted(connection.send_packed_command)  # type: ignore[method-assign]


def run_one(name: str, url: str, num_jobs: int) -> None:
    """In a process of its own. Prints its numbers as JSON, last."""
    count_messages()
    CONTENDERS[name](url, num_jobs)
    (started_at, cpu_before, sent_before), (ended_at, cpu_after, sent_after) = marks[0], marks[-1]
    numbers = {
        "rate": num_jobs / (ended_at - started_at),
        "cpu_ms": (cpu_after - cpu_before) / num_jobs * 1e3,
        "trips": (sent_after - sent_before) / num_jobs,
    }
    print(json.dumps(numbers), flush=True)
    os._exit(0)  # some leave threads behind


def compare(server: RedisServer, num_jobs: int, num_runs: int) -> None:
    names = [name for name in CONTENDERS if " " in name or name == "ours" or importlib.util.find_spec(name)]
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(num_runs):
        for name in names:
            redis.Redis.from_url(server.url).flushall()
            call = f"job_queue.run_one({name!r}, {server.url!r}, {num_jobs})"
            try:
                done = subprocess.run(
                    command(call), stdout=subprocess.PIPE, text=True, timeout=60, cwd=ROOT, check=True
                )
            except subprocess.SubprocessError as error:
                print(f"{name}: {error}")
            else:
                measured[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{num_jobs} no-op jobs, {IN_FLIGHT} in flight where the worker can; medians of {num_runs} runs")
    print(f"{'':18}{'jobs/s':>9}{'CPU ms/job':>12}{'round trips/job':>17}{'ratio':>10}")
    ours_rate = statistics.median(run["rate"] for run in measured["ours"])
    for name, runs in measured.items():
        if runs:
            rate, cpu_ms, trips = (statistics.median(run[key] for run in runs) for key in ("rate", "cpu_ms", "trips"))
            print(f"{name:18}{rate:9.0f}{cpu_ms:12.2f}{trips:17.2f}{ours_rate / rate:9.2f}x")


def used_bytes(connection: "redis.Redis") -> int:
    return int(connection.info("memory")["used_memory"])


def memory(url: str, deepest: int) -> None:
    """Bytes per queued job and per kept result, at growing depths; and what a claim costs at that depth."""
    logging.disable(logging.ERROR)
    connection = redis.Redis.from_url(url)
    print("\nRedis memory, 1,000 token ids a request and 1,000 tokens a result, top 0; then short jobs in deep queues")
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
            marks.clear()
            NoopWorker.num_tokens = num_tokens
            before = used_bytes(connection)
            worker = NoopWorker(["demo"], connection=connection)
            worker.work(burst=True, logging_level="ERROR", max_jobs=1000)
            num_queued -= 1000
            kept = queued + (used_bytes(connection) - before) / 1000
            rate = len(marks) / (marks[-1][0] - marks[0][0])
            print(
                f"{num_tokens:5} tokens, {depth:7} queued: {queued:7.0f} bytes a queued job, "
                f"{kept:7.0f} a finished one, {rate:6.0f} jobs/s"
            )


def wake_up(server: RedisServer, num_waiters: int, num_jobs: int) -> None:
    """From the submission to the client's wake-up, through a live worker, while others wait as well."""
    with subprocess.Popen(command(f"job_queue.serve({server.url!r})"), cwd=ROOT) as worker:
        try:
            taken = sorted(asyncio.run(_wake_up(server.url, num_waiters, num_jobs)))
        finally:
            worker.terminate()
    p50, p99 = taken[len(taken) // 2], taken[int(len(taken) * 0.99)]
    print(f"\nsubmission to wake-up, {num_waiters} waiting, 100 jobs/s: p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms")


async def _wake_up(url: str, num_waiters: int, num_jobs: int) -> list[float]:
    connection, stream = redis.asyncio.Redis.from_url(url), redis.asyncio.Redis.from_url(url)
    queue = Submitter(connection, store.Settings(), Keyring([]))
    waiting = Waiting(stream, connection, on_ended=lambda count: None)
    waiting.start()

    async def read(id_: str) -> wire.Job:
        status = as_text(await connection.hget(f"rq:job:{id_}", "status") or b"queued")
        return wire.Job(id=id_, kind="score", model="demo", status=status, created_at=0.0)  # type: ignore[arg-type]

    async def one() -> float:
        id_ = uuid4().hex
        started_at = time.perf_counter()
        await queue.submit("bench", [request(1)], [id_])
        await waiting.until_ended(id_, lambda: read(id_), 30.0)
        return time.perf_counter() - started_at

    others = [
        asyncio.create_task(waiting.until_ended(uuid4().hex, lambda: read("none"), 600.0)) for _ in range(num_waiters)
    ]
    while not await connection.exists("rq:workers"):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)
    jobs = []
    for _ in range(num_jobs):
        jobs.append(asyncio.create_task(one()))
        await asyncio.sleep(0.01)
    taken = await asyncio.gather(*jobs)
    for other in others:
        other.cancel()
    await waiting.close()
    await stream.aclose()
    await connection.aclose()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--deepest", type=int, default=100_000, help="queue; 1000000 takes minutes and 2 GB")
    parser.add_argument("--appendfsync", default="everysec", help="of Redis: everysec, or always")
    parser.add_argument("--quick", action="store_true", help="few jobs, once: shows that all runs")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    fsync = options.appendfsync
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder) / "r", appendfsync=fsync) as server:
        compare(server, 100 if options.quick else options.jobs, 1 if options.quick else options.runs)
        deepest = 1_000 if options.quick else options.deepest
        subprocess.run(command(f"job_queue.memory({server.url!r}, {deepest})"), cwd=ROOT, check=True)
    # One of its own: the other still writes away a million jobs.
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder) / "r", appendfsync=fsync) as server:
        wake_up(server, *((100, 20) if options.quick else (1000, 500)))


if __name__ == "__main__":
    main()
