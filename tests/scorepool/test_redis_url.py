"""A wrong Redis URL or password stops every process with one sentence that names the setting."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scorepool.local.demo import free_port
from scorepool.local.redis_server import find_binary
from tests.conftest import wait_until_up

BIN = Path(sys.executable).parent
COMMANDS = {
    "serve": [BIN / "scorepool", "serve"],
    "api": [BIN / "scorepool", "api"],
    "worker": [BIN / "scorepool", "worker", "--model", "demo=/no/such/folder"],
    "worker --webhooks": [BIN / "scorepool", "worker", "--webhooks"],
    "python -m scorepool.api": [sys.executable, "-m", "scorepool.api"],
}
OTHERS = ("nobody:right@", "")  # wrong credentials; the commands have one way to check them
MALFORMED = ["redis://:secret@127.0.0.1:port/0", "redis://:secret@127.0.0.1:1?nonsense=1"]  # tests/store has many more


def in_soak(cases: Iterable[tuple[str, ...]]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.soak) for case in cases]


@pytest.fixture(scope="module")
def protected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a Redis with a password; yield the path of its socket."""
    socket = str(tmp_path_factory.mktemp("r") / "s")
    options = ["--port", "0", "--unixsocket", socket, "--requirepass", "right", "--save", ""]
    with subprocess.Popen([find_binary(), *options], stdout=subprocess.DEVNULL) as server:
        try:
            wait_until_up(f"unix://:right@{socket}")
            yield socket
        finally:
            server.terminate()


def stderr_of(command: str, redis_url: str, state: Path) -> str:
    """Run a command that must fail, and return its stderr."""
    environ = os.environ | {
        "SCOREPOOL_REDIS_URL": redis_url,
        "RQ_REDIS_URL": redis_url,
        "SCOREPOOL_STATE_DIR": str(state),
        "SCOREPOOL_PORT": str(free_port()),
    }
    done = subprocess.run(COMMANDS[command], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize(
    ("command", "credentials"),
    [
        ("worker", ":wrong@"),
        *(("api", one) for one in OTHERS),
        *in_soak((command, ":wrong@") for command in COMMANDS if command != "worker"),
    ],
)
def test_a_wrong_password_stops_the_process(command: str, credentials: str, protected: str, tmp_path: Path):
    [line] = stderr_of(command, f"unix://{credentials}{protected}", tmp_path).splitlines()
    assert line.startswith("scorepool: SCOREPOOL_REDIS_URL: Redis refuses the user or the password of the URL")


@pytest.mark.parametrize(
    ("command", "url"),
    [
        ("api", MALFORMED[0]),
        ("api", MALFORMED[1]),
        *in_soak((command, MALFORMED[0]) for command in COMMANDS if command != "api"),
    ],
)
def test_a_malformed_url_stops_the_process(command: str, url: str, tmp_path: Path):
    [line] = stderr_of(command, url, tmp_path).splitlines()
    assert line.startswith("scorepool: SCOREPOOL_REDIS_URL")
    assert "secret" not in line


@pytest.mark.parametrize("command", ["serve", *in_soak([("worker",), ("worker --webhooks",)])])
def test_a_url_at_which_no_redis_answers_stops_the_process(command: str, tmp_path: Path):
    [line] = stderr_of(command, "redis://:secret@127.0.0.1:1", tmp_path).splitlines()
    assert line.startswith("scorepool: SCOREPOOL_REDIS_URL: no Redis answers at the URL: ")
    assert "127.0.0.1:1" in line
    assert "secret" not in line
