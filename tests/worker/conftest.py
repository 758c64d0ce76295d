"""Fixtures of the worker's tests: jobs submitted as the API submits them, and `rq worker` processes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self
from uuid import uuid4

import pytest
from redis import Redis
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat

from scorepool import store, wire

MODEL = "demo"


def generate(prompt: str = "hello", max_tokens: int = 4, timeout_s: int = 600) -> wire.Generate:
    return wire.Generate(model=MODEL, prompt=prompt, max_tokens=max_tokens, timeout_s=timeout_s)


def submit(
    redis: Redis,
    request: wire.Request | bytes,
    *,
    queue: str = MODEL,
    webhook: bool = False,
    fields: dict[str, object] | None = None,
) -> str:
    """Submit a job as the API's script does. A `request` in bytes is written unchanged."""
    job_id = uuid4().hex
    body = request if isinstance(request, bytes) else wire.encode(request)
    mapping = {
        "data": JSONSerializer.dumps([store.INFER, None, [], {}]),
        "created_at": utcformat(now()),
        "enqueued_at": utcformat(now()),
        "origin": queue,
        "status": "queued",
        "description": "generate demo",
        "timeout": 600 if isinstance(request, bytes) else request.timeout_s,
        "retries_left": 3,
        "result_ttl": 3600,
        "failure_ttl": 3600,
        "kind": "generate" if isinstance(request, bytes) else wire.kind_of(request),
        "model": MODEL,
    }
    with redis.pipeline() as pipeline:
        pipeline.hset(f"rq:job:{job_id}", mapping=mapping | (fields or {}))
        pipeline.set(store.Keys.request(job_id), body)
        if webhook:
            pipeline.hset(f"rq:job:{job_id}", mapping={"owner": "alice", "webhook": "https://hooks.example/"})
        pipeline.sadd("rq:queues", f"rq:queue:{queue}")
        pipeline.rpush(f"rq:queue:{queue}", job_id)
        pipeline.publish(store.Keys.wakeup(queue), job_id)
        pipeline.execute()
    return job_id


def outcome(redis: Redis, job_id: str) -> wire.Outcome | None:
    body = redis.get(store.Keys.outcome(job_id))
    return None if body is None else wire.decode_outcome(body)


def failure(redis: Redis, job_id: str) -> wire.Failure:
    found = outcome(redis, job_id)
    assert isinstance(found, wire.Failure), found
    return found


def done(redis: Redis) -> list[str]:
    """Return the ids of ended jobs in the order of their ends. An id is repeated for each recorded end."""
    return [fields[b"id"].decode() for _, fields in redis.xrange(store.DONE)]


def status(redis: Redis, job_id: str) -> str:
    return (redis.hget(f"rq:job:{job_id}", "status") or b"").decode()


def most_at_once(redis: Redis, ids: list[str]) -> int:
    """Return the most of these ended jobs that were in flight together, by their start and end times."""
    spans = [redis.hmget(f"rq:job:{job_id}", "started_at", "ended_at") for job_id in ids]
    return max(sum(start <= at < end for start, end in spans) for at, _ in spans)


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so after {timeout_s} s"
        time.sleep(0.02)


class Workers:
    """A context with processes of `rq worker`, killed at its end. `log` holds the output of all of them."""

    def __init__(self, redis_url: str, root: Path, folder: Path) -> None:
        self.redis_url = redis_url
        self.root = root
        self.log_path = folder / "log"
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        print(self.log if self.processes else "")  # pytest shows the output of failed tests

    def start(
        self,
        *options: str,
        worker: str = "FakeWorker",
        queues: tuple[str, ...] = ("demo:high", "demo", "demo:low"),
        **environ: str,
    ) -> subprocess.Popen[bytes]:
        return self._start("worker", worker, *options, *queues, **environ)

    def start_pool(self, *options: str, **environ: str) -> subprocess.Popen[bytes]:
        """Start `rq worker-pool`, which starts worker processes of its own."""
        return self._start("worker-pool", "FakeWorker", *options, "demo:high", "demo", "demo:low", **environ)

    def _start(self, kind: str, worker: str, *arguments: str, **environ: str) -> subprocess.Popen[bytes]:
        settings = {"SCOREPOOL_MODEL": "demo=fake", "SCOREPOOL_LEASE_S": "1", "PYTHONPATH": str(self.root)}
        command = [
            str(Path(sys.executable).parent / "rq"),
            *(kind, "-w", worker if "." in worker else f"tests.worker.fake.{worker}", "-u", self.redis_url),
        ]
        with self.log_path.open("ab") as log:
            process = subprocess.Popen(
                [*command, *arguments],
                cwd=self.root,
                env=os.environ | settings | environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def rq(self, *arguments: str) -> str:
        """Run another command of RQ with the fake worker class. Return its output."""
        return self._rq(arguments[0], "-w", "tests.worker.fake.FakeWorker", *arguments[1:])

    def rq_as_documented(self, *arguments: str) -> str:
        """Run a command of RQ with the variables of docs/operations.md. Return its output."""
        classes = {"RQ_WORKER_CLASS": "scorepool.worker.BatchWorker", "RQ_JOB_CLASS": "scorepool.worker.Job"}
        return self._rq(*arguments, **classes, RQ_QUEUE_CLASS="scorepool.worker.Queue")

    def _rq(self, name: str, *arguments: str, **environ: str) -> str:
        command = [str(Path(sys.executable).parent / "rq"), name, "-u", self.redis_url, *arguments]
        settings = {**os.environ, "PYTHONPATH": str(self.root), **environ}
        return subprocess.run(
            command, cwd=self.root, env=settings, check=True, capture_output=True, text=True, timeout=60
        ).stdout


@pytest.fixture
def workers(redis_url: str, redis: Redis, root: Path, tmp_path: Path) -> Iterator[Workers]:
    with Workers(redis_url, root, tmp_path) as workers:
        yield workers
