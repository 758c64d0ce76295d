"""docs/operations.md works on real processes: a backup under load, a restore, and RQ's tools."""

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import yaml
from redis import Redis
from rq.registry import BaseRegistry

from scorepool import wire
from scorepool.local.redis_server import RedisServer
from scorepool.worker.rq.worker import Worker
from tests.api.conftest import score
from tests.api.fake_worker import FakeWorker
from tests.api.test_process import eventually, is_ready, running
from tests.worker.conftest import Workers, outcome, status

SCRAPE_S = 15  # the interval of Prometheus


def back_up(server: RedisServer, copy: Path) -> None:
    """Follow the document, with redis-py for redis-cli."""
    with Redis.from_url(server.url) as redis:
        redis.config_set("auto-aof-rewrite-percentage", 0)
        eventually(lambda: redis.info("persistence")["aof_rewrite_in_progress"] == 0)
        shutil.copytree(server.folder / "appendonlydir", copy / "appendonlydir")
        redis.config_set("auto-aof-rewrite-percentage", 100)


def test_jobs_accepted_before_a_backup_end_after_a_restore(root: Path, tmp_path: Path):
    accepted: list[str] = []
    stopped = threading.Event()

    def load(http: httpx.Client) -> None:
        while not stopped.is_set():
            accepted.append(http.post("/v1/jobs", json=score(wait_for_model=True)).json()["id"])

    with RedisServer(tmp_path / "a") as server, running(root, server.url, tmp_path / "log") as (http, _):
        eventually(lambda: is_ready(http))
        endpoint = http.get("/v1/webhooks/endpoints").json()
        driver = threading.Thread(target=load, args=(http,))
        driver.start()
        eventually(lambda: len(accepted) > 30)
        before = list(accepted)
        back_up(server, tmp_path / "b")
        stopped.set()
        driver.join()

    with (
        RedisServer(tmp_path / "b") as server,
        Redis.from_url(server.url) as redis,
        Workers(server.url, root, tmp_path) as workers,
    ):
        workers.start("--burst").wait(timeout=60)
        assert endpoint == {"endpoints": []}
        assert all(isinstance(outcome(redis, job_id), wire.Result) for job_id in before)
        assert {status(redis, job_id) for job_id in before} == {"finished"}
        with running(root, server.url, tmp_path / "log") as (http, _):
            eventually(lambda: is_ready(http))
            assert http.get(f"/v1/jobs/{before[0]}").json()["status"] == "finished"


def test_rqs_tools_work_with_the_variables_of_the_document(redis: Redis, redis_url: str, root: Path):
    text = (root / "docs/operations.md").read_text()
    [block] = re.findall(r"```sh\n(export SCOREPOOL_REDIS_URL.*?)```", text, re.DOTALL)
    documented = dict(re.findall(r"(\w+)=(\S+)", block))
    urls = {"RQ_REDIS_URL": redis_url, "SCOREPOOL_REDIS_URL": redis_url}
    environ = {**os.environ, **documented, "PYTHONPATH": str(root), **urls}
    FakeWorker(redis).register()

    def rq(*arguments: str) -> str:
        command = [str(Path(sys.executable).with_name("rq")), *arguments]
        done = subprocess.run(command, env=environ, cwd=root, check=True, capture_output=True, text=True, timeout=60)
        return done.stdout

    redis.sadd("rq:queues", "rq:queue:demo")
    rq("suspend")
    assert "demo" in rq("info")
    assert redis.exists("rq:suspended")
    rq("resume")
    assert not redis.exists("rq:suspended")


def test_the_document_explains_every_registry_of_rq(root: Path):
    text = (root / "docs/operations.md").read_text()
    keys = set(re.findall(r"^\| \w+ \| `rq:(\w+):NAME` \|", text, re.MULTILINE))
    kinds = [kind for kind in BaseRegistry.__subclasses__() if kind.__module__ == "rq.registry"]  # those of queues
    assert keys == {"queue"} | {kind.key_template.split(":")[1] for kind in kinds}


def test_every_metric_and_alert_of_the_document_exists(root: Path):
    text = (root / "docs/operations.md").read_text()
    source = "".join(path.read_text() for path in (root / "api" / "metrics").glob("*.py"))
    for name in set(re.findall(r"`scorepool_(\w+)", text)):
        assert name.removesuffix("_total") in source, name
    alerts = (root / "deploy/alerts.yml").read_text()
    for name in set(re.findall(r"`(Scorepool\w+)`", text)):
        assert f"alert: {name}" in alerts


def test_the_alert_for_a_silent_worker_fires_before_its_entry_expires(root: Path, redis: Redis, redis_url: str):
    rules = yaml.safe_load((root / "deploy/alerts.yml").read_text())["groups"][0]["rules"]
    [rule] = [rule for rule in rules if rule["alert"] == "ScorepoolWorkerSilent"]
    [threshold_s] = re.findall(r"> (\d+)$", rule["expr"])
    worker = Worker(["demo"], connection=redis)
    worker.register_birth()
    worker._send_heartbeat()
    ttl_s = redis.ttl(worker.key)

    assert worker.settings.lease_s < float(threshold_s) < ttl_s - SCRAPE_S
    assert "for" not in rule  # a pending alert would end with the worker's entry
