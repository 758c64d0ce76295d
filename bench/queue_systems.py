"""The systems that bench.job_queue compares: scorepool's worker and other job queues, each with jobs that do nothing.

A system runs in a process of its own, which imports this module, so that jobs that name `noop` add to its `samples`.
To add a system, write a function that puts the jobs on a queue and runs them all, and add it to SYSTEMS.
"""

import asyncio
import json
import os
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import uuid4

import redis
import redis.asyncio
import rq
from rq.serializers import JSONSerializer

from scorepool import store, wire
from scorepool.api.auth import Keyring
from scorepool.api.repositories.queue import Queue
from scorepool.worker.rq.worker import Worker

IN_FLIGHT = 32
PROVENANCE = wire.Provenance(
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
    """Do the work of a job: append to `samples`."""
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
        stamp=PROVENANCE,
    )


def make_request(num_tokens: int, model: str = "demo") -> wire.Score:
    item = wire.ScoreItem(prompt=[1], completion=list(range(num_tokens)))
    return wire.Score(model=model, items=[item], wait_for_model=True)


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


async def submit(url: str, num_jobs: int, num_tokens: int = 1, model: str = "demo") -> None:
    async with redis.asyncio.Redis.from_url(url) as connection:
        queue = Queue(connection, store.Settings(max_queue_depth=10**7), Keyring([]).weight, False)
        for start in range(0, num_jobs, 500):
            count = min(500, num_jobs - start)
            await queue.submit("bench", [make_request(num_tokens, model)] * count, [uuid4().hex for _ in range(count)])


def run_scorepool(url: str, num_jobs: int) -> None:
    asyncio.run(submit(url, num_jobs))
    NoopWorker(["demo"], connection=redis.Redis.from_url(url)).work(burst=True, logging_level="ERROR")


def run_rq(url: str, num_jobs: int) -> None:
    connection = redis.Redis.from_url(url)
    queue = rq.Queue("plain", connection=connection, serializer=JSONSerializer)
    queue.enqueue_many([rq.Queue.prepare_data("bench.queue_systems.noop") for _ in range(num_jobs)])
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
