"""Commands that are stopped, or whose stdin, stdout or stderr is closed, as processes of their own."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scorepool import wire
from tests.scorepool.files.faulty_server import Reply, faulty_server

SCOREPOOL = str(Path(sys.executable).with_name("scorepool"))
ROW = b'{"prompt": "1", "completion": "x"}\n'
PROMPT_END_S = 60.0  # well below the time that silent servers take, with a busy machine in mind
QUEUED = wire.Job(id="j1", kind="score", model="demo", status="queued", created_at=0.0)


class Server:
    """Answers, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.has_jobs_that_end, self.has_silent_cancellations = True, False
        self.ended = threading.Event()

    def fault(self, method: str, path: str) -> Reply | None:
        self.calls.append(f"{method} {path}")
        if path.endswith("/cancel"):
            self.ended.wait(200 if self.has_silent_cancellations else 0)
            return 200, wire.encode(QUEUED)
        if method == "GET" and path.startswith("/v1/jobs/") and not self.has_jobs_that_end:
            self.ended.wait(0.1)
            return 200, wire.encode(QUEUED)
        return None

    def wait_for(self, part: str) -> None:
        deadline = time.monotonic() + 120
        while not any(part in call for call in list(self.calls)):
            assert time.monotonic() < deadline, self.calls
            time.sleep(0.01)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Let commands inherit no signal that is ignored here, as by `nohup`."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    with faulty_server(server.fault) as url:
        yield url
        server.ended.set()


def start(url: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [SCOREPOOL, "score", *map(str, arguments), "--url", url], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )


def check_end(command: subprocess.Popen[bytes], seconds: float = PROMPT_END_S) -> None:
    """Check that a command that was stopped ends soon, with one sentence. Its stdin stays open until then."""
    assert command.wait(seconds) == 130
    _, stderr = command.communicate()
    assert stderr.decode().splitlines()[-1].startswith("scorepool: stopped"), stderr
    assert b"Traceback" not in stderr
    assert b"Fatal" not in stderr


@pytest.mark.parametrize("source", ["stdin", "FIFO"])
def test_a_command_that_waits_for_a_silent_pipe_ends_at_once(server: Server, url: str, tmp_path: Path, source: str):
    fifo = tmp_path / "in.jsonl"
    os.mkfifo(fifo)
    command = start(url, "-" if source == "stdin" else fifo, "-o", tmp_path / "out.jsonl")
    assert command.stdin is not None
    with command.stdin if source == "stdin" else fifo.open("wb") as pipe:
        pipe.write(ROW * 300)
        pipe.flush()
        server.wait_for("GET /v1/jobs/")
        time.sleep(0.2)
        command.send_signal(signal.SIGINT)
        check_end(command)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda how: how.name)
def test_a_command_that_is_stopped_cancels_its_jobs(server: Server, url: str, tmp_path: Path, how: signal.Signals):
    server.has_jobs_that_end = False
    path = tmp_path / "in.jsonl"
    path.write_bytes(ROW)
    command = start(url, path, "-o", tmp_path / "out.jsonl")
    server.wait_for("GET /v1/jobs/j1")
    command.send_signal(how)
    check_end(command)
    assert server.calls[-1] == "POST /v1/jobs/j1/cancel"


def test_a_second_ctrl_c_ends_a_command_that_cannot_cancel_its_jobs(server: Server, url: str, tmp_path: Path):
    server.has_jobs_that_end, server.has_silent_cancellations = False, True
    path = tmp_path / "in.jsonl"
    path.write_bytes(ROW)
    command = start(url, path, "-o", tmp_path / "out.jsonl")
    server.wait_for("GET /v1/jobs/j1")
    command.send_signal(signal.SIGINT)
    server.wait_for("/cancel")
    command.send_signal(signal.SIGINT)
    check_end(command)


def test_a_command_that_nohup_started_goes_on_when_its_terminal_closes(server: Server, url: str, tmp_path: Path):
    server.has_jobs_that_end = False
    path = tmp_path / "in.jsonl"
    path.write_bytes(ROW)
    command = subprocess.Popen(
        ["nohup", SCOREPOOL, "score", path, "-o", tmp_path / "out.jsonl", "--url", url],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    server.wait_for("GET /v1/jobs/j1")
    command.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    server.has_jobs_that_end = True
    assert command.wait(120) == 0


@pytest.mark.parametrize(
    ("arguments", "closed", "status", "sentence"),
    [
        (["-", "-o", "out.jsonl"], "<&-", 2, "scorepool: stdin is closed: expected rows, or the path of FILE\n"),
        (["in.jsonl", "-o", "-"], ">&-", 2, "scorepool: stdout is closed: expected the path of OUT\n"),
        (["in.jsonl", "-o", "out.jsonl"], "<&- >&-", 0, "1 row done, 0 failed\n"),
        (["in.jsonl", "-o", "out.jsonl"], "<&- >&- 2>&-", 0, ""),
    ],
    ids=["stdin", "stdout", "both", "all"],
)
def test_streams_may_be_closed(url: str, tmp_path: Path, arguments: list[str], closed: str, status: int, sentence: str):
    (tmp_path / "in.jsonl").write_bytes(ROW)
    command = f"{SCOREPOOL} score {' '.join(arguments)} --url {url} {closed}"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, stdin=None
    )
    assert (done.returncode, done.stderr, done.stdout) == (status, sentence, "")
    assert (tmp_path / "out.jsonl").exists() == (status == 0)
