"""Real processes on two servers: a worker on each, kill -9 of both, and workers on a wrong server."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from redis import Redis
from typer.testing import CliRunner

from scorepool.cli import app
from scorepool.local.doctor import Trouble, check_redis
from scorepool.store import Settings
from tests.api.conftest import Serving, generate
from tests.api.spread.conftest import OtherServer
from tests.worker.conftest import Workers

BIG = ("big:high", "big", "big:low")


@pytest.mark.anyio
async def test_kill_9_of_a_worker_on_each_server_loses_no_job(
    root: Path, spread: Serving, redis: Redis, redis_url: str, other_server: OtherServer, urls: str, tmp_path: Path
):
    (tmp_path / "home").mkdir()
    (tmp_path / "other").mkdir()
    environ = {"SCOREPOOL_REDIS_URLS": urls, "SCOREPOOL_REDIS_URL": redis_url, "FAKE_STEP_S": "0.05"}
    options = ("--connection-class", "scorepool.worker.Redis")
    with (
        Workers(redis_url, root, tmp_path / "home") as home,
        Workers(other_server.url, root, tmp_path / "other") as away,
    ):

        def start_both() -> None:
            home.start(*options, **environ)
            away.start(*options, queues=BIG, **environ | {"SCOREPOOL_MODEL": "big,large=fake"})

        start_both()
        async with spread() as http, asyncio.timeout(120):
            bodies = [generate(model=model, max_tokens=20, wait_for_model=True) for model in ("demo", "big")]
            ids = [(await http.post("/v1/jobs", json=body)).json()["id"] for body in bodies]
            for job_id in ids:
                while (await http.get(f"/v1/jobs/{job_id}")).json()["status"] != "started":  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            for workers in (home, away):
                os.kill(workers.processes[0].pid, signal.SIGKILL)
            start_both()
            jobs = [(await http.get(f"/v1/jobs/{job_id}?wait=60")).json() for job_id in ids]
    assert [(job["status"], job["model"]) for job in jobs] == [("finished", "demo"), ("finished", "big")]


def test_rq_worker_ends_with_a_sentence_on_another_server_than_that_of_its_models(
    root: Path, redis: Redis, redis_url: str, urls: str, tmp_path: Path
):
    environ = {"SCOREPOOL_REDIS_URLS": urls, "SCOREPOOL_REDIS_URL": redis_url, "SCOREPOOL_MODEL": "big,large=fake"}
    with Workers(redis_url, root, tmp_path) as workers:
        assert workers.start("--connection-class", "scorepool.worker.Redis", queues=BIG, **environ).wait(60) == 1
        assert "connected to another Redis than that of 'big', which SCOREPOOL_REDIS_URLS['big'] names" in workers.log
        assert "Traceback" not in workers.log


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Return the environments of what the commands would start."""
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda _, arguments, environ: started.append(environ))
    return started


def test_a_worker_is_started_on_the_server_of_its_models(
    redis: Redis, redis_url: str, other: Redis, other_server: OtherServer, urls: str, started: list[dict[str, str]]
):
    runner = CliRunner(env={"SCOREPOOL_REDIS_URLS": urls, "SCOREPOOL_REDIS_URL": redis_url})
    for options in (["--model", "big,large=x"], ["--model", "demo=x"], ["--webhooks"]):
        assert runner.invoke(app, ["worker", *options], catch_exceptions=False).exit_code == 0
    assert [environ["RQ_REDIS_URL"] for environ in started] == [other_server.url, redis_url, redis_url]
    for options in (["--model", "big=x", "--model", "demo=x"], ["--model", "big,other=x"]):
        done = runner.invoke(app, ["worker", *options])
        assert done.exit_code == 1
        assert "a worker has one Redis, and SCOREPOOL_REDIS_URLS puts 'big' and" in done.output
    done = runner.invoke(app, ["serve"])
    assert done.exit_code == 1
    assert "`serve` runs all processes on one Redis" in done.output
    assert len(started) == 3


def test_the_api_starts_while_a_server_is_down_and_not_with_a_url_that_names_none(
    redis_url: str, tmp_path: Path, started: list[dict[str, str]]
):
    urls = json.dumps({"big": f"unix://{tmp_path / 'absent'}"})
    runner = CliRunner(env={"SCOREPOOL_REDIS_URL": redis_url})
    assert runner.invoke(app, ["api"], env={"SCOREPOOL_REDIS_URLS": urls}).exit_code == 0
    done = runner.invoke(app, ["api"], env={"SCOREPOOL_REDIS_URLS": '{"big": "nowhere"}'})
    assert done.exit_code == 1
    assert "SCOREPOOL_REDIS_URLS['big']: the Redis URL cannot be parsed" in done.output
    assert len(started) == 1


def test_doctor_checks_all_servers(redis_url: str, other: Redis, urls: str, tmp_path: Path):
    environ = {"SCOREPOOL_REDIS_URL": redis_url}
    settings = Settings(redis_url=redis_url, redis_urls=urls)
    assert check_redis(settings, environ)
    absent = Settings(redis_url=redis_url, redis_urls=json.dumps({"big": f"unix://{tmp_path / 'absent'}"}))
    with pytest.raises(
        Trouble, match=r"^SCOREPOOL_REDIS_URLS\['big'\]: no Redis answers.*correct SCOREPOOL_REDIS_URLS\['big'\]$"
    ):
        check_redis(absent, environ)
