"""The password of Redis can stay out of the command line: every command reads the URL from a file."""

import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scorepool.cli import app
from scorepool.local.redis_server import RedisServer
from scorepool.local.stack import Stack, rq
from scorepool.store import Settings, SettingsError
from scorepool.worker import Redis

COMMANDS = [["api"], ["worker", "--model", "demo=x"], ["worker", "--webhooks"]]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory):
    with RedisServer(tmp_path_factory.mktemp("r")) as server:
        with Redis.from_url(server.url) as redis:
            redis.config_set("requirepass", "hush")
        yield server.url.replace("unix://", "unix://:hush@")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Return what the commands would start: arguments and environment."""
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda _, arguments, environ: started.append((arguments, environ)))
    return started


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_names_the_file_and_no_argument_holds_the_password(
    command: list[str], url: str, tmp_path: Path, started: list[tuple[list[str], dict[str, str]]]
):
    (tmp_path / "url").write_text(f"\n{url}\n")
    done = CliRunner(env={"SCOREPOOL_REDIS_URL": "redis://127.0.0.1:1"}).invoke(
        app, [*command, "--redis-url-file", str(tmp_path / "url")], catch_exceptions=False
    )
    [(arguments, environ)] = started
    assert "hush" not in " ".join(arguments) + done.output
    assert Settings.load(environ).redis_url == url
    assert environ.get("RQ_REDIS_URL", url) == url


@pytest.mark.parametrize("command", COMMANDS)
def test_a_password_in_the_command_line_is_warned_of(
    command: list[str], url: str, started: list[tuple[list[str], dict[str, str]]]
):
    for redis_url, is_warned in ((url, True), ("redis://127.0.0.1:1", False)):
        done = CliRunner().invoke(app, [*command, "--redis-url", redis_url], catch_exceptions=False)
        assert ("--redis-url-file" in done.stderr) == is_warned
        assert "hush" not in done.output
    assert len(started) == (2 if command == ["api"] else 1)  # a worker needs a Redis that answers


def test_rq_warns_of_a_password_in_its_command_line(url: str, root: Path):
    command = [rq(), "info", "--connection-class", "scorepool.worker.Redis"]
    by_option = subprocess.run([*command, "--url", url], cwd=root, capture_output=True, text=True, check=True)
    by_variable = subprocess.run(
        command, cwd=root, env=os.environ | {"RQ_REDIS_URL": url}, capture_output=True, text=True, check=True
    )
    assert "set RQ_REDIS_URL instead of `--url`" in by_option.stderr
    assert "RQ_REDIS_URL" not in by_variable.stderr
    assert "hush" not in by_option.stderr + by_variable.stderr


def test_a_stack_keeps_the_url_of_its_own_redis(tmp_path: Path):
    (tmp_path / "url").write_text("redis://elsewhere")
    stack = Stack(["demo=x"], state=tmp_path, environ={"SCOREPOOL_REDIS_URL_FILE": str(tmp_path / "url")})
    assert "SCOREPOOL_REDIS_URL_FILE" not in stack._environ
    assert stack.redis_url.startswith("unix://")


@pytest.mark.parametrize("content", ["", "\n", "redis://hush redis://hush", b"\xff"])
def test_a_file_without_one_url_is_refused_without_being_shown(content: str | bytes, tmp_path: Path):
    (tmp_path / "url").write_bytes(content if isinstance(content, bytes) else content.encode())
    for path in (tmp_path / "url", tmp_path / "none", tmp_path):
        with pytest.raises(SettingsError, match="SCOREPOOL_REDIS_URL_FILE=") as caught:
            Settings.load({"SCOREPOOL_REDIS_URL_FILE": str(path)})
        assert "hush" not in str(caught.value)


def test_a_file_that_every_user_may_write_to_is_refused(tmp_path: Path):
    (tmp_path / "url").write_text("redis://h")
    (tmp_path / "url").chmod(0o602)
    with pytest.raises(SettingsError, match="chmod o-w"):
        Settings.load({"SCOREPOOL_REDIS_URL_FILE": str(tmp_path / "url")})


def test_variable_and_file_exclude_each_other(tmp_path: Path):
    (tmp_path / "url").write_text("redis://h")
    with pytest.raises(SettingsError, match="both set"):
        Settings.load({"SCOREPOOL_REDIS_URL": "redis://h", "SCOREPOOL_REDIS_URL_FILE": str(tmp_path / "url")})
    assert Settings.load({"SCOREPOOL_REDIS_URL_FILE": str(tmp_path / "url")}).redis_url == "redis://h"
