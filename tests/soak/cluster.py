"""Redis, two APIs, two workers of one model, a webhook worker: started, and started again whenever one dies.

With `appendfsync` "everysec" a kill -9 of Redis is a power cut as well: what it wrote in the last second is gone.
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
from scorepool.local.stack import api_command, rq, webhook_command

RESTART_DELAY_S = 0.2
LOST_S = 1.0
APIS = ("api 0", "api 1")
WORKERS = ("worker 0", "worker 1")
PARTS = (*APIS, *WORKERS, "webhooks", "redis")


class Cluster:
    """`worker` is the class of the model's workers, `model` the folder that they load. Use as a context."""

    def __init__(
        self, folder: Path, root: Path, *, worker: str, model: str, settings: Mapping[str, str], appendfsync: str
    ) -> None:
        self.redis_server = RedisServer(folder / "redis", appendfsync=appendfsync)
        self._sizes: deque[tuple[float, Path, int]] = deque()  # of the append-only file, in the last second
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
            **{part: api_command() for part in APIS},
            **{part: [rq(), "worker", "-w", worker, "--with-scheduler", *queues] for part in WORKERS},
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ended = threading.Event()
        self._reviver = threading.Thread(target=self._revive)

    def __enter__(self) -> Self:
        self.redis_server.__enter__()
        for part in self._commands:
            self._start(part)
        self._reviver.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        self.redis_server.stop()

    def connect(self) -> Redis:
        return Redis.from_url(self.redis_server.url)

    def pid(self, part: str) -> int:
        process = self.redis_server.process if part == "redis" else self._processes[part]
        assert process is not None
        return process.pid

    def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        for url in self.urls:
            while not _serves(url):
                assert time.monotonic() < deadline, self.log_path.read_text()[-3000:]
                time.sleep(0.1)

    def stop(self) -> None:
        """Everything but Redis, by SIGTERM."""
        self._ended.set()
        self._reviver.join()
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, part: str) -> None:
        environ = dict(self._environ)
        if part in APIS:
            environ["SCOREPOOL_PORT"] = str(self.ports[APIS.index(part)])
        with self.log_path.open("ab") as log:
            self._processes[part] = subprocess.Popen(
                self._commands[part], cwd=self._root, env=environ, stdout=log, stderr=subprocess.STDOUT
            )

    def _revive(self) -> None:
        while not self._ended.wait(RESTART_DELAY_S):
            if self.redis_server.process is not None and self.redis_server.process.poll() is not None:
                if self.redis_server.process.returncode == -signal.SIGKILL:
                    self._cut_power()
                with suppress(RedisServerError):  # it was killed while it loaded its data
                    self.redis_server.start()
            self._note_size()
            for part, process in self._processes.items():
                if process.poll() is not None:
                    self._start(part)

    def _note_size(self) -> None:
        if self.redis_server.appendfsync == "everysec":
            for path in sorted(self.redis_server.folder.glob("appendonlydir/*.incr.aof"))[-1:]:
                self._sizes.append((time.monotonic(), path, path.stat().st_size))
            while self._sizes and self._sizes[0][0] < time.monotonic() - LOST_S:
                self._sizes.popleft()

    def _cut_power(self) -> None:
        """Cut off what was written since the oldest size that is known."""
        if self._sizes:
            _, path, num_bytes = self._sizes[0]
            os.truncate(path, num_bytes)
            self._sizes.clear()


def _serves(url: str) -> bool:
    try:
        reply = httpx.get(f"{url}/readyz", timeout=5.0, trust_env=False)
    except httpx.HTTPError:
        return False
    return reply.status_code == 200 and reply.json()["models"] == ["demo"]
