"""Whatever Redis does, a process refuses to start with a sentence, or runs without spinning and obeys SIGTERM."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from redis import Redis

from scorepool.local.demo import free_port
from scorepool.local.redis_server import find_binary
from scorepool.local.stack import webhook_command
from tests.api.conftest import SECRET
from tests.conftest import wait_until_up

STOP_S = 20.0  # twice what is promised, for a busy machine
API = [sys.executable, "-m", "scorepool.api"]
SCOREPOOL = str(Path(sys.executable).with_name("scorepool"))
REPLIES = {  # to every command
    "hangs": None,
    "closes": b"",
    "nil": b"$-1\r\n",
    "number": b":5\r\n",
    "garbage": b"*%$\0\r\n",
    "loading": b"-LOADING Redis is loading the dataset in memory\r\n",
    "readonly": b"-READONLY You can't write against a read only replica.\r\n",
    "misconf": b"-MISCONF Redis is configured to save snapshots\r\n",
    "noauth": b"-NOAUTH Authentication required.\r\n",
}


@contextmanager
def answering(reply: bytes | None) -> Iterator[str]:
    """Run a server that gives one reply to whatever it is sent, none (None), or closes (empty); yield its URL."""

    def answer(client: socket.socket) -> None:
        with suppress(OSError), client:
            while (sent := client.recv(65536)) and reply != b"":
                if reply is not None:
                    client.sendall(reply * max(1, sent.count(b"\r\n*") + 1))

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=[server.accept()[0]], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        server.shutdown(socket.SHUT_RDWR)


@contextmanager
def redis_server(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    command = [find_binary(), "--port", "0", "--unixsocket", str(folder / "s"), "--dir", str(folder), "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_until_up(f"unix://{folder / 's'}")
            yield f"unix://{folder / 's'}", server
        finally:
            server.kill()


class Process:
    """A process of scorepool, started beside others."""

    def __init__(self, command: list[str], redis_url: str, folder: Path) -> None:
        self.log = folder / f"{free_port()}.log"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SCOREPOOL_")} | {
            "SCOREPOOL_REDIS_URL": redis_url,
            "RQ_REDIS_URL": redis_url,
            "SCOREPOOL_PORT": str(free_port()),
            "SCOREPOOL_STATE_DIR": str(folder),
            "SCOREPOOL_WEBHOOK_SECRET": SECRET,
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_for(self, text: str) -> None:
        """Wait until the log contains the text."""
        deadline = time.monotonic() + 60
        while text not in self.log.read_text():
            assert time.monotonic() < deadline, self.log.read_text()
            assert self._process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def refusal(self) -> str:
        """Return the sentence with which the process ended."""
        assert self._process.wait(60) == 1
        [line] = self.log.read_text().splitlines()
        return line

    def cpu_s(self) -> float:
        """Return the CPU time that the process has used (s)."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def check_stopped(self) -> None:
        """Check that a process that was sent SIGTERM ends in STOP_S, and that it has not filled its log."""
        self._process.wait(STOP_S)
        assert self.log.read_text().count("\n") < 200

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.mark.soak
def test_a_redis_that_hangs_leaves_no_process_behind(tmp_path: Path):
    """Every process beside the others: the API and the webhook worker, and what `scorepool` starts."""
    with ExitStack() as stack:

        def start(command: list[str], redis_url: str) -> Process:
            process = Process(command, redis_url, tmp_path)
            stack.callback(process.kill)
            return process

        hanging = stack.enter_context(answering(REPLIES["hangs"]))
        (tmp_path / "redis").mkdir()
        url, server = stack.enter_context(redis_server(tmp_path / "redis"))
        serve = start([SCOREPOOL, "serve"], hanging)
        webhooks = start(webhook_command(), hanging)
        running = [start(API, hanging), start(webhook_command(), url)]
        running[0].wait_for("listening on http:")
        running[1].wait_for("Listening on webhooks")
        server.send_signal(signal.SIGSTOP)
        if Path("/proc").exists():
            before_s = [process.cpu_s() for process in running]
            time.sleep(1.0)
            assert max(process.cpu_s() - used_s for process, used_s in zip(running, before_s, strict=True)) < 0.5
        for process in running:
            process.terminate()
        assert "no Redis answers at the URL" in serve.refusal()
        assert "no Redis answers at the URL" in webhooks.refusal()
        for process in running:
            process.check_stopped()


@pytest.mark.soak
@pytest.mark.parametrize("name", REPLIES)
def test_every_process_obeys_sigterm_whatever_redis_answers(name: str, tmp_path: Path):
    with answering(REPLIES[name]) as url:
        processes = [Process(command, url, tmp_path) for command in (API, webhook_command(), [SCOREPOOL, "serve"])]
        try:
            time.sleep(8)
            for process in processes:
                process.terminate()
            for process in processes:
                process.check_stopped()
                assert "Traceback" not in process.log.read_text() or name in ("nil", "number")
        finally:
            for process in processes:
                process.kill()


FAULTS = {
    "gone": [],
    "password": [("CONFIG", "SET", "requirepass", "x"), ("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")],
    "acl": [("ACL", "SETUSER", "default", "-@all")],
    "replica": [("REPLICAOF", "127.0.0.1", "1")],
    "no replicas": [("CONFIG", "SET", "min-replicas-to-write", "1")],
    "full": [("CONFIG", "SET", "maxmemory", "1")],
}


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
def test_every_process_obeys_sigterm_when_redis_begins_to_refuse(fault: str, tmp_path: Path):
    (tmp_path / "redis").mkdir()
    with redis_server(tmp_path / "redis") as (url, server):
        processes = [Process(command, url, tmp_path) for command in (API, webhook_command())]
        try:
            processes[0].wait_for("listening on http:")
            processes[1].wait_for("Listening on webhooks")
            with Redis.from_url(url) as redis:
                for command in FAULTS[fault]:
                    redis.execute_command(*command)
            if fault == "gone":
                server.kill()
            time.sleep(5)
            for process in processes:
                process.terminate()
            for process in processes:
                process.check_stopped()
                assert "Traceback" not in process.log.read_text()
        finally:
            for process in processes:
                process.kill()
