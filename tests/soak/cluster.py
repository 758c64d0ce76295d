"""Run Redis, two APIs, two workers of one model and a webhook worker, and restart each whenever it dies.

Each of the two workers reaches Redis through a network of its own, `links`, which chaos makes bad.

With `appendfsync` "everysec" a kill -9 of Redis is also a power cut: what it wrote in the last second is removed.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
from redis import Redis

from scorepool import store
from scorepool.local.demo import free_port
from scorepool.local.redis_server import RedisServer, RedisServerError
from scorepool.local.stack import CONNECTION_CLASS, api_command, rq, webhook_command
from tests.fleet.link import Link
from tests.soak.processes import Processes

LOST_S = 1.0  # seconds of writes that a power cut loses
APIS = ("api 0", "api 1")
WORKERS = ("worker 0", "worker 1")
PROCESSES = (*APIS, *WORKERS, "webhooks", "redis")


class Cluster:
    """A context manager that runs the processes. `worker` is the class of the workers, `model` the folder they load."""

    def __init__(
        self, folder: Path, root: Path, *, worker: str, model: str, settings: Mapping[str, str], appendfsync: str
    ) -> None:
        self.redis_server = RedisServer(folder / "redis", appendfsync=appendfsync)
        self._sizes: deque[tuple[float, Path, int]] = (
            deque()
        )  # time, path and bytes of the append-only file in the last second
        self.ports = [free_port() for _ in APIS]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.log_path = folder / "processes.log"
        self._shared = {
            "SCOREPOOL_REDIS_URL": self.redis_server.url,
            "RQ_REDIS_URL": self.redis_server.url,
            "SCOREPOOL_MODEL": f"demo={model}",
            "PYTHONPATH": str(root),
            **settings,
        }
        self._worker = [rq(), "worker", "-w", worker, *CONNECTION_CLASS, "--with-scheduler", *store.queue_names("demo")]
        self.links = {name: Link(self.redis_server.url) for name in WORKERS}
        self._processes = Processes(root, self.log_path, self._watch_redis)

    def __enter__(self) -> Self:
        self.redis_server.__enter__()
        for link in self.links.values():
            link.__enter__()
        commands = {
            "webhooks": (webhook_command(), self._shared),
            **{
                name: (api_command(), self._shared | {"SCOREPOOL_PORT": str(port)})
                for name, port in zip(APIS, self.ports, strict=True)
            },
            **{
                name: (
                    self._worker,
                    self._shared | dict.fromkeys(("SCOREPOOL_REDIS_URL", "RQ_REDIS_URL"), link.url),
                )
                for name, link in self.links.items()
            },
        }
        self._processes.start(commands)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        for link in self.links.values():
            link.__exit__(kind, error, tb)
        self.redis_server.stop()

    def connect(self) -> Redis:
        return Redis.from_url(self.redis_server.url)

    def pid(self, name: str) -> int:
        if name != "redis":
            return self._processes.pid(name)
        assert self.redis_server.process is not None
        return self.redis_server.process.pid

    def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        for url in self.urls:
            while not _serves_demo(url):
                assert time.monotonic() < deadline, self.log_path.read_text()[-3000:]
                time.sleep(0.1)

    def stop(self) -> None:
        """Stop everything but Redis with SIGTERM."""
        self._processes.stop()

    def _watch_redis(self) -> None:
        if self.redis_server.process is not None and self.redis_server.process.poll() is not None:
            if self.redis_server.process.returncode == -signal.SIGKILL:
                self._cut_power()
            with suppress(RedisServerError):  # it was killed while loading its data
                self.redis_server.start()
        self._record_file_size()

    def _record_file_size(self) -> None:
        if self.redis_server.appendfsync == "everysec":
            for path in sorted(self.redis_server.folder.glob("appendonlydir/*.incr.aof"))[-1:]:
                self._sizes.append((time.monotonic(), path, path.stat().st_size))
            while self._sizes and self._sizes[0][0] < time.monotonic() - LOST_S:
                self._sizes.popleft()

    def _cut_power(self) -> None:
        """Truncate the file to its size one second ago."""
        if self._sizes:
            _, path, num_bytes = self._sizes[0]
            os.truncate(path, num_bytes)
            self._sizes.clear()


def _serves_demo(url: str) -> bool:
    try:
        reply = httpx.get(f"{url}/readyz", timeout=5.0, trust_env=False)
    except httpx.HTTPError:
        return False
    return reply.status_code == 200 and reply.json()["models"] == ["demo"]
