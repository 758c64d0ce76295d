"""Wrong Redis URLs and passwords: the worker exits with one sentence that names the setting and holds no secret."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

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
        ("redis://:secret-1@127.0.0.1/abc", "the database of the Redis URL is no number"),
        ("{server}?password=right&db=99", "DB index is out of range"),
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


def documented_commands(root: Path, document: str) -> str:
    """Return the commands of a document that need RQ_REDIS_URL, as a shell script that takes the URL of Redis."""
    text = (root / document).read_text()
    if document == "docker-compose.yml":
        return shlex.join(yaml.safe_load(text)["services"]["webhooks"]["command"])
    [block] = [block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "RQ_REDIS_URL" in block]
    lines = [line.replace(".venv/bin/", "") for line in block.splitlines() if "export SCOREPOOL_REDIS_URL" not in line]
    return "\n".join(lines if any(line.startswith("rq ") for line in lines) else [*lines, "rq info"])


@pytest.mark.parametrize("url", ["{server}?password=secret-1", "redis://:secret-1@127.0.0.1:port/0"])
@pytest.mark.parametrize("document", ["docs/deploy.md", "docs/operations.md", "docker-compose.yml"])
def test_a_documented_command_names_the_wrong_setting_in_one_sentence(
    root: Path, server: RedisServer, document: str, url: str
):
    url = url.format(server=server.url)
    environ = os.environ | {"SCOREPOOL_REDIS_URL": url, "RQ_REDIS_URL": url}
    environ["PATH"] = f"{Path(rq()).parent}:{environ['PATH']}"
    command = ["sh", "-c", documented_commands(root, document)]

    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=100)

    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("scorepool: SCOREPOOL_REDIS_URL ")
    assert "secret-1" not in line


def test_an_unreachable_redis_is_not_reported_as_a_wrong_url():
    assert Redis.from_url("redis://127.0.0.1:1/0")
