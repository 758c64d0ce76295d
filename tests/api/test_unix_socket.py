"""The API listens on a unix socket that only its user can open, takes over what a killed one left, and removes it."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
from redis import Redis

from scorepool import Client, ScorepoolError, Unreachable, wire
from scorepool.api.unix_socket import PATH_MAX_BYTES, UnixSocket
from scorepool.local.commands import example_command
from scorepool.local.stack import api_url
from scorepool.store import Settings, SettingsError
from tests.api.fake_worker import FakeWorker
from tests.api.test_process import environ, eventually


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, because the path of a unix socket is short."""
    with TemporaryDirectory(prefix="scorepool-") as name:
        yield Path(name)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_file_is_the_users_alone_from_the_moment_it_exists(folder: Path, umask: int):
    """Another process that looks again and again never sees other permissions."""
    path = folder / "api.sock"
    seen: set[int] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            if path.exists():
                seen.add(mode_of(path))

    former = os.umask(umask)
    looking = threading.Thread(target=look)
    looking.start()
    try:
        unix_socket = UnixSocket.listen(str(path))
        assert os.umask(umask) == umask
        seen.add(mode_of(path))
    finally:
        is_over.set()
        looking.join()
        os.umask(former)
    unix_socket.listener.close()
    assert seen == {0o600}


def test_a_file_that_a_killed_process_left_is_replaced(folder: Path):
    left = UnixSocket.listen(str(folder / "s"))
    left.listener.close()
    unix_socket = UnixSocket.listen(str(folder / "s"))
    unix_socket.listener.close()
    left.remove()  # no longer its own
    assert mode_of(folder / "s") == 0o600
    unix_socket.remove()
    unix_socket.remove()
    assert list(folder.iterdir()) == []


def test_of_several_processes_that_start_at_once_one_listens(folder: Path):
    def listen(_: int) -> UnixSocket | None:
        try:
            return UnixSocket.listen(str(folder / "s"))
        except SettingsError:
            return None

    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "s"))
    with ThreadPoolExecutor(8) as threads:
        [unix_socket] = [one for one in threads.map(listen, range(8)) if one is not None]
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(folder / "s"))
        unix_socket.listener.accept()[0].close()
    unix_socket.listener.close()


@pytest.mark.parametrize("kind", ["file", "folder", "link", "in use", "long", "no folder", "NUL"])
def test_what_is_no_socket_of_ours_is_left_alone(folder: Path, kind: str):
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as other:
        match kind:
            case "file":
                path.write_text("precious")
            case "folder":
                path.mkdir()
            case "link":
                path.symlink_to(folder / "elsewhere")
            case "in use":
                other.bind(str(path))
                other.listen()
            case "long":
                path = folder / ("a" * PATH_MAX_BYTES)
            case "no folder":
                path = folder / "none" / "s"
            case "NUL":
                path = folder / "a\0b"
        before = sorted(folder.iterdir())
        with pytest.raises(SettingsError, match="SCOREPOOL_UDS="):
            UnixSocket.listen(str(path))
    assert sorted(folder.iterdir()) == before
    assert kind != "file" or path.read_text() == "precious"


def test_the_api_serves_on_its_socket_alone_and_removes_it(root: Path, redis: Redis, redis_url: str, folder: Path):
    FakeWorker(redis).register()
    path = folder / "a b.sock"
    settings = environ(redis_url=redis_url, uds=str(path), host="0.0.0.0")
    url = api_url(Settings(uds=str(path)))
    with (
        subprocess.Popen(
            [sys.executable, "-m", "scorepool.api"],
            cwd=root,
            env=settings,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as api,
        Client(url) as client,
    ):
        try:
            eventually(lambda: path.exists() or api.poll() is not None)
            eventually(lambda: is_ready(client))
            assert mode_of(path) == 0o600
            job_id = client.submit(wire.Score(model="demo", items=[wire.ScoreItem(prompt="a", completion="b")]))
            assert client.job(job_id).status == "queued"
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as http:
                for headers in ({"Host": "evil.example"}, {"X-Forwarded-For": "10.0.0.1"}, {"Origin": "null"}):
                    assert http.get("/v1/jobs", headers=headers).status_code == 403
            done = subprocess.run(
                ["/bin/sh", "-c", example_command(url, "demo").replace("wait=30", "wait=1")],
                capture_output=True,
                text=True,
                check=True,
            )
            assert '"status":"queued"' in done.stdout
            with pytest.raises(SettingsError, match="another process listens on it"):
                UnixSocket.listen(str(path))
        finally:
            api.send_signal(signal.SIGTERM)
        assert api.wait(30) == -signal.SIGTERM
        assert api.stderr is not None
        assert "Traceback" not in api.stderr.read().decode()
    assert list(folder.iterdir()) == []


def is_ready(client: Client) -> bool:
    try:
        return bool(client.models())
    except (Unreachable, ScorepoolError):
        return False
