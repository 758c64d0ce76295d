"""Run Redis, two APIs, two workers of one model and a webhook worker, and restart each whenever it dies.

Each of the two workers reaches Redis through a network of its own, `links`, which chaos makes bad.

With `appendfsync` "everysec" a kill -9 of Redis is also a power cut: what it wrote in the last second is removed.
"""

import os
import signal
import subprocess
import threading
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

RESTART_DELAY_S = 0.2
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
        self._root = root
        shared = {
            "SCOREPOOL_REDIS_URL": self.redis_server.url,
            "RQ_REDIS_URL": self.redis_server.url,
            "SCOREPOOL_MODEL": f"demo={model}",
            "PYTHONPATH": str(root),
        }
        self._environ = {**os.environ, **shared, **settings}
        queues = store.queue_names("demo")
        self._commands = {
            "webhooks": webhook_command(),
            **{name: api_command() for name in APIS},
            **{
                name: [rq(), "worker", "-w", worker, *CONNECTION_CLASS, "--with-scheduler", *queues] for name in WORKERS
            },
        }
        self.links = {name: Link(self.redis_server.url) for name in WORKERS}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping = threading.Event()
        self._restarter = threading.Thread(target=self._restart_dead)

    def __enter__(self) -> Self:
        self.redis_server.__enter__()
        for link in self.links.values():
            link.__enter__()
        for name in self._commands:
            self._start(name)
        self._restarter.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        for link in self.links.values():
            link.__exit__(kind, error, tb)
        self.redis_server.stop()

    def connect(self) -> Redis:
        return Redis.from_url(self.redis_server.url)

    def pid(self, name: str) -> int:
        process = self.redis_server.process if name == "redis" else self._processes[name]
        assert process is not None
        return process.pid

    def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        for url in self.urls:
            while not _serves_demo(url):
                assert time.monotonic() < deadline, self.log_path.read_text()[-3000:]
                time.sleep(0.1)

    def stop(self) -> None:
        """Stop everything but Redis with SIGTERM."""
        self._stopping.set()
        self._restarter.join()
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name: str) -> None:
        environ = dict(self._environ)
        if name in APIS:
            environ["SCOREPOOL_PORT"] = str(self.ports[APIS.index(name)])
        if name in self.links:
            environ |= dict.fromkeys(("SCOREPOOL_REDIS_URL", "RQ_REDIS_URL"), self.links[name].url)
        with self.log_path.open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self._commands[name], cwd=self._root, env=environ, stdout=log, stderr=subprocess.STDOUT
            )

    def _restart_dead(self) -> None:
        while not self._stopping.wait(RESTART_DELAY_S):
            if self.redis_server.process is not None and self.redis_server.process.poll() is not None:
                if self.redis_server.process.returncode == -signal.SIGKILL:
                    self._cut_power()
                with suppress(RedisServerError):  # it was killed while loading its data
                    self.redis_server.start()
            self._record_file_size()
            for name, process in self._processes.items():
                if process.poll() is not None:
                    self._start(name)

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
