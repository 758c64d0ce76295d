"""Models on two Redis servers: kill -9 of everything, restarts of both servers, and every accepted job ends once.

Each server has two workers and a webhook worker; two APIs serve both. See audit.py for what is checked of each server.
"""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import pytest
from redis import Redis

from scorepool import store
from scorepool.local.demo import free_port
from scorepool.local.redis_server import RedisServer, RedisServerError
from scorepool.local.stack import CONNECTION_CLASS, api_command, rq, webhook_command
from tests.soak.audit import Audit
from tests.soak.driver import Driver
from tests.soak.log import Log
from tests.soak.processes import Processes
from tests.soak.receiver import receiver
from tests.soak.test_soak import SECRETS, SETTINGS, wait_until_idle

MODELS = ("demo", "big")  # the first is on home
PAUSES_S = (0.5, 2.0, 6.0)  # the last is longer than a command may take


class SpreadCluster:
    """A context manager that runs the processes, and restarts each whenever it dies."""

    def __init__(self, folder: Path, root: Path, settings: Mapping[str, str]) -> None:
        self.servers = {model: RedisServer(folder / model) for model in MODELS}
        home, other = (server.url for server in self.servers.values())
        self.log_path = folder / "processes.log"
        self._processes = Processes(root, self.log_path, self._start_dead_redis)
        shared = {
            "SCOREPOOL_REDIS_URL": home,
            "SCOREPOOL_REDIS_URLS": json.dumps({"big": other}),
            "PYTHONPATH": str(root),
            **settings,
        }
        self._commands: dict[str, tuple[list[str], dict[str, str]]] = {}
        self.urls = []
        for number in range(2):
            port = free_port()
            self.urls.append(f"http://127.0.0.1:{port}")
            self._commands[f"api {number}"] = (api_command(), shared | {"SCOREPOOL_PORT": str(port)})
        worker = [rq(), "worker", "-w", "tests.worker.fake.FakeWorker", *CONNECTION_CLASS, "--with-scheduler"]
        for model, server in self.servers.items():
            environ = shared | {"RQ_REDIS_URL": server.url, "SCOREPOOL_MODEL": f"{model}=fake"}
            for number in range(2):
                self._commands[f"{model} {number}"] = ([*worker, *store.queue_names(model)], environ)
            self._commands[f"webhooks of {model}"] = (webhook_command(), environ)

    @property
    def names(self) -> list[str]:
        return [*self._commands, *(f"redis of {model}" for model in MODELS)]

    def __enter__(self) -> Self:
        for server in self.servers.values():
            server.__enter__()
        self._processes.start(self._commands)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        for server in self.servers.values():
            server.stop()

    def pid(self, name: str) -> int:
        if not name.startswith("redis of "):
            return self._processes.pid(name)
        process = self.servers[name.removeprefix("redis of ")].process
        assert process is not None
        return process.pid

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        while not all(self._is_ready(url) for url in self.urls):
            assert time.monotonic() < deadline, self.log_path.read_text()[-3000:]
            time.sleep(0.1)

    @staticmethod
    def _is_ready(url: str) -> bool:
        with suppress(httpx.HTTPError):
            reply = httpx.get(f"{url}/readyz", timeout=5.0, trust_env=False)
            return reply.status_code == 200 and set(reply.json()["models"]) == set(MODELS)
        return False

    def stop(self) -> None:
        """Stop everything but Redis."""
        self._processes.stop()

    def _start_dead_redis(self) -> None:
        for server in self.servers.values():
            if server.process is not None and server.process.poll() is not None:
                with suppress(RedisServerError):  # it was killed while loading its data
                    server.start()


def send_signals(cluster: SpreadCluster, log: Log, seed: int, num_signals: int, every_s: float) -> None:
    """Kill or stop a random process, one every `every_s` seconds on average, each at least once."""
    rng, resumers = random.Random(seed), list[threading.Timer]()
    names = [cluster.names[number % len(cluster.names)] for number in range(num_signals)]
    rng.shuffle(names)
    for name in names:
        time.sleep(rng.uniform(0.3, 1.7) * every_s)
        action, pid = rng.choices(("kill", "pause"), (3, 1))[0], cluster.pid(name)
        log.write("signal", process=name, action=action)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if action == "kill" else signal.SIGSTOP)
            if action == "pause":
                resumers.append(threading.Timer(rng.choice(PAUSES_S), go_on, [pid]))
                resumers[-1].start()
    for resumer in resumers:
        resumer.join()


def go_on(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def audits(cluster: SpreadCluster, driver_log: Log, receiver_log: Log) -> dict[str, Audit]:
    """Audit each server for the jobs of its model. An entry of the logs that is of no job counts for both."""
    model_of = {entry["id"]: entry["model"] for entry in driver_log if entry["event"] == "accepted"}
    found = {}
    for model, server in cluster.servers.items():

        def is_own(entry: Mapping[str, Any], model: str = model) -> bool:
            return model_of.get(str(entry.get("id")).removeprefix("wh_"), model) == model

        with Redis.from_url(server.url) as redis:
            entries = [list(filter(is_own, log)) for log in (driver_log, receiver_log)]
            ids = {key.decode()[-32:] for key in redis.scan_iter("rq:job:wh_*")}
            own = [entry for entry in entries[1] if entry["id"].removeprefix("wh_") in ids]
            found[model] = Audit(redis, entries[0], own, model=model)
            strays = [job_id for job_id in model_of if model_of[job_id] != model and redis.exists(f"rq:job:{job_id}")]
            if strays:
                found[model].findings["job on two servers"] = strays
    return found


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seed", "num_jobs", "num_signals", "duration_s"), [(1, 10_000, 60, 180)])
def test_every_accepted_job_of_two_servers_ends_once(
    root: Path, tmp_path: Path, seed: int, num_jobs: int, num_signals: int, duration_s: float
):
    with ExitStack() as stack:
        logs = [stack.enter_context(Log(tmp_path / f"{name}.log")) for name in ("driver", "receiver", "signals")]
        webhook = stack.enter_context(receiver(SECRETS, logs[1]))
        cluster = stack.enter_context(SpreadCluster(tmp_path, root, SETTINGS))
        cluster.wait_until_ready()
        driver = Driver(cluster.urls, webhook, logs[0], seed, num_jobs, duration_s, MODELS)
        driver.start()
        try:
            send_signals(cluster, logs[2], seed, num_signals, duration_s / num_signals)
            driver.join()
            for model, server in cluster.servers.items():
                with Redis.from_url(server.url) as redis:
                    wait_until_idle(redis, 120 + duration_s, model)
        finally:
            driver.stop()
            cluster.stop()
        found = audits(cluster, logs[0], logs[1])
        for model, audit in found.items():
            print(model, audit, sep="\n")
        print(Counter((entry["process"], entry["action"]) for entry in logs[2]))
    assert {model: audit.findings for model, audit in found.items()} == {"demo": {}, "big": {}}
    assert sum(audit.counts["accepted"] for audit in found.values()) >= num_jobs
    assert min(audit.counts["accepted"] for audit in found.values()) > num_jobs // 4
