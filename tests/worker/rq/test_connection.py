"""Wrong Redis URLs and passwords: the worker exits with one sentence that names the setting and holds no secret."""

import subprocess
from pathlib import Path

import pytest

from scorepool.local.redis_server import RedisServer
from scorepool.local.stack import rq
from scorepool.worker import Redis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with RedisServer(tmp_path_factory.mktemp("r")) as server:
        with Redis.from_url(server.url) as redis:
            redis.config_set("requirepass", "right")
        yield server


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("{server}?password=secret-1", "refuses the user or the password"),
        ("{server}", "refuses the user or the password"),
        ("secret-1", "cannot be parsed"),
        ("redis://:secret-1@127.0.0.1:port/0", "cannot be parsed"),
        ("redis+sentinel://:secret-1@127.0.0.1/", "SERVICE"),
    ],
)
@pytest.mark.parametrize("name", ["BatchWorker", "WebhookWorker"])
def test_rq_worker_names_the_wrong_setting_in_one_sentence(
    root: Path, server: RedisServer, name: str, url: str, reason: str
):
    url = url.format(server=server.url)
    command = [rq(), "worker", "-w", f"scorepool.worker.{name}", "--connection-class", "scorepool.worker.Redis"]

    done = subprocess.run([*command, "--url", url, "demo"], cwd=root, capture_output=True, text=True, timeout=100)

    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("scorepool: SCOREPOOL_REDIS_URL ")
    assert reason in line
    assert "secret-1" not in line


def test_an_unreachable_redis_is_not_reported_as_a_wrong_url():
    assert Redis.from_url("redis://127.0.0.1:1/0")
