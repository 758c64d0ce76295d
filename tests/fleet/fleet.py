"""A fleet on one machine: Redis, and hosts with a worker each, every one behind a bad network of its own."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import msgspec
import redis.asyncio
from redis import Redis

from scorepool import store, wire
from scorepool.api.auth import Keyring
from scorepool.api.repositories.queue import Queue
from scorepool.local.redis_server import RedisServer
from tests.fleet.fake_engine import EngineStats
from tests.fleet.link import Link

ROOT = Path(__file__).parent.parent.parent
MODEL = "demo"
START_TIMEOUT_S = 120.0


class Fleet:
    """A context with a Redis. `settings` are variables of all workers, beside those of a host."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.server = RedisServer(folder / "r", appendfsync="everysec")
        self.settings = {"SCOREPOOL_MODEL": f"{MODEL}=fake", "SCOREPOOL_LOG_LEVEL": "INFO", **(settings or {})}
        self.hosts: list[Host] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.server)
        self.redis = self._stack.enter_context(Redis.from_url(self.server.url))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for host in self.hosts:
            host.close()
        self._stack.close()
        if error is not None:
            print(*(f"---- {host.name}\n{host.log[-5000:]}" for host in self.hosts), sep="\n")

    def host(self, name: str, *, link: Mapping[str, Any] | None = None, **options: Any) -> "Host":
        """Add a host and start its worker. `link` are LinkSettings; see Host for the rest."""
        host = Host(self, name, self._stack.enter_context(Link(self.server.url, **(link or {}))), **options)
        self.hosts.append(host)
        host.start()
        return host

    def wait_until_up(self, hosts: Iterable["Host"] | None = None) -> None:
        """Wait until the workers serve the model and have gone idle."""
        for host in self.hosts if hosts is None else hosts:
            until(lambda host=host: host.is_up, START_TIMEOUT_S)  # type: ignore[misc]

    def submit(self, *requests: wire.Request) -> list[str]:
        """Submit jobs as the API does, near Redis; return their ids."""
        return asyncio.run(self._submit(requests))

    async def _submit(self, requests: Sequence[wire.Request]) -> list[str]:
        job_ids = [uuid4().hex for _ in requests]
        async with redis.asyncio.Redis.from_url(self.server.url) as connection:
            queue = Queue(connection, store.Settings(max_queue_depth=10**7), Keyring([]).weight, False)
            for start in range(0, len(requests), 500):
                await queue.submit("fleet", requests[start : start + 500], job_ids[start : start + 500])
        return job_ids

    def ends(self) -> dict[str, float]:
        """Return when each ended job was recorded: unix, s, by Redis's clock. Raises ValueError if one was twice."""
        found: dict[str, float] = {}
        for entry_id, fields in self.redis.xrange(store.DONE):
            job_id = fields[b"id"].decode()
            if job_id in found:
                raise ValueError(f"the end of {job_id} was recorded twice")
            found[job_id] = int(entry_id.split(b"-")[0]) / 1000
        return found

    def wait_until_done(self, job_ids: Iterable[str], timeout_s: float = 60.0) -> float:
        """Wait until all have ended. Return when the last one was recorded: unix, s, by Redis's clock."""
        wanted = set(job_ids)
        until(lambda: self.redis.xlen(store.DONE) >= len(wanted) and wanted <= self.ends().keys(), timeout_s, 0.05)
        ends = self.ends()
        return max(ends[job_id] for job_id in wanted)

    def outcome(self, job_id: str) -> wire.Outcome | None:
        body = self.redis.get(store.Keys.outcome(job_id))
        return None if body is None else wire.decode_outcome(body)

    def fields(self, job_id: str) -> dict[str, str]:
        return {name.decode(): value.decode(errors="replace") for name, value in self._hash(job_id).items()}

    def _hash(self, job_id: str) -> dict[bytes, bytes]:
        return self.redis.hgetall(store.RqKeys.job(job_id))

    def holder(self, job_id: str) -> str | None:
        """Return the name of the worker that holds a job."""
        for execution in self.redis.zrange(store.RqKeys.executions(job_id), 0, -1):
            name = self.redis.hget(store.RqKeys.execution(f"{job_id}:{execution.decode()}"), "worker_name")
            if name:
                return str(name.decode())
        return None

    def now(self) -> float:
        """Return Redis's clock: unix, s."""
        seconds, microseconds = self.redis.time()
        return seconds + microseconds / 1e6


class Host:
    """A worker process behind a Link. `speed` is that of its engine; `environ` are more variables of the process.

    Two hosts with the same `machine` are two workers of one machine: one sees that the other's process is gone.
    """

    def __init__(
        self,
        fleet: Fleet,
        name: str,
        link: Link,
        *,
        speed: float = 1.0,
        worker: str = "FleetWorker",
        options: Sequence[str] = (),
        machine: str | None = None,
        **environ: str,
    ) -> None:
        self.fleet = fleet
        self.name = name
        self.link = link
        self.process: subprocess.Popen[bytes] | None = None
        self.log_path = fleet.folder / f"{name}.log"
        self.stats_path = fleet.folder / f"{name}.stats"
        self._wakers: list[threading.Timer] = []
        self._numbers = itertools.count()
        self._worker = worker if "." in worker else f"tests.fleet.fake_engine.{worker}"
        self._options = list(options)
        self._environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OPENBLAS_NUM_THREADS": "1",
            "FLEET_MACHINE": machine or name,
            "FLEET_SPEED": str(speed),
            "FLEET_STATS": str(self.stats_path),
            **fleet.settings,
            **environ,
        }

    def start(self) -> None:
        """Start the worker, also again after its end."""
        command = [
            str(Path(sys.executable).parent / "rq"),
            *("worker", "-w", self._worker, "--connection-class", "scorepool.worker.Redis"),
            *("-u", self.link.url, "--name", self.name),
            *(*self._options, *store.queue_names(MODEL)),
        ]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=self._environ, stdout=log, stderr=subprocess.STDOUT)

    @property
    def is_up(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} has ended:\n{self.log[-3000:]}")
        key = store.RqKeys.worker(self.name)
        return bool(
            self.fleet.redis.exists(store.Keys.served_model(self.name))
            and self.fleet.redis.hget(key, "state") in (b"idle", b"busy")
        )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def stop(self) -> None:
        """Put the host to sleep: SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def sleep(self, seconds: float) -> None:
        """Put the host to sleep, and return at once. It wakes by itself."""
        self.stop()
        waker = threading.Timer(seconds, self.wake)
        self._wakers.append(waker)
        waker.start()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self, timeout_s: float = 120.0) -> tuple[float, int]:
        """Send SIGTERM. Return the seconds until the process has ended, and its exit status."""
        assert self.process is not None
        started_at = time.monotonic()
        self.process.terminate()
        status = self.process.wait(timeout_s)
        return time.monotonic() - started_at, status

    def close(self) -> None:
        for waker in self._wakers:
            waker.cancel()
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def stats(self) -> list[EngineStats]:
        """Return what the engine wrote, oldest first."""
        lines = self.stats_path.read_bytes().splitlines() if self.stats_path.exists() else []
        return [msgspec.json.decode(line, type=EngineStats) for line in lines]


def score(num_tokens: int = 20, *, top_logprobs: int = 0, prompt_tokens: int = 1, **fields: Any) -> wire.Score:
    """Return a job that scores so many tokens."""
    item = wire.ScoreItem(prompt=[300] * prompt_tokens, completion=[260 + index % 50 for index in range(num_tokens)])
    return wire.Score(model=MODEL, items=[item], top_logprobs=top_logprobs, wait_for_model=True, **fields)


def generate(max_tokens: int, *, prompt: str = "hello", **fields: Any) -> wire.Generate:
    """Return a job that generates so many tokens, one a step."""
    return wire.Generate(model=MODEL, prompt=prompt, max_tokens=max_tokens, wait_for_model=True, **fields)


def until(condition: Callable[[], object], timeout_s: float = 60.0, every_s: float = 0.02) -> None:
    """Wait until the condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so after {timeout_s} s")
        time.sleep(every_s)
