"""A Redis user with the rights that docs/deploy.md lists is enough for every process."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError

from scorepool.local.redis_server import RedisServer
from tests.api.conftest import SECRET, generate
from tests.api.test_process import eventually, running, serves
from tests.conftest import denied, documented_rights, limit_rights
from tests.worker.conftest import Workers, until

LINE = (
    b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"demo","prompt":"a","max_tokens":2}}\n'
)


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[tuple[Redis, str]]:
    """Run a Redis with the limited user; yield the administrator's connection and the user's URL."""
    with RedisServer(tmp_path / "redis") as server, Redis.from_url(server.url) as admin:
        yield admin, limit_rights(admin, server.url)


def test_the_documented_rights_suffice(limited: tuple[Redis, str], root: Path, tmp_path: Path):
    admin, url = limited
    (tmp_path / "workers").mkdir()
    with (
        Workers(url, root, tmp_path / "workers") as workers,
        running(root, url, tmp_path / "log", webhook_secret=SECRET) as (http, _),
    ):
        workers.start("--with-scheduler", "--name", "mac", SCOREPOOL_LEASE_S="5")
        eventually(lambda: serves(http, "demo"))
        job_id = http.post("/v1/jobs", json=generate(max_tokens=3)).json()["id"]
        assert http.get(f"/v1/jobs/{job_id}?wait=60").json()["status"] == "finished"
        long_job = http.post("/v1/jobs", json=generate(max_tokens=100_000)).json()["id"]
        until(lambda: http.get(f"/v1/jobs/{long_job}").json()["status"] == "started")
        assert http.post(f"/v1/jobs/{long_job}/cancel").status_code in (200, 202)  # 200: it has stopped already
        assert http.get(f"/v1/jobs/{long_job}?wait=60").json()["status"] == "canceled"
        assert len(http.get("/v1/jobs").json()["jobs"]) == 2
        assert http.delete(f"/v1/jobs/{job_id}").status_code == 204
        endpoint = http.post("/v1/webhooks/endpoints", json={"url": "https://a.example/"}).json()["endpoint"]
        assert http.post("/v1/webhooks/test", json={"endpoint_id": endpoint["id"]}).status_code == 202
        body = generate(max_tokens=3, webhook="https://b.example/", expires_at=time.time() + 60)
        notified = http.post("/v1/jobs", json=body).json()["id"]
        assert http.get(f"/v1/jobs/{notified}?wait=60").json()["status"] == "finished"
        assert len(http.get("/v1/webhooks/deliveries").json()["deliveries"]) == 3
        file = http.post("/v1/files", files={"file": ("f.jsonl", LINE)}, data={"purpose": "batch"}).json()["id"]
        create = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = http.post("/v1/batches", json=create).json()["id"]
        until(lambda: http.get(f"/v1/batches/{batch}").json()["status"] == "completed")
        assert "scorepool_redis_up 1.0" in http.get("/metrics").text
        assert "mac" in workers.rq("info")
        workers.processes[0].terminate()
        assert workers.processes[0].wait(60) == 0
    assert denied(admin) == []


def test_the_rights_cover_every_command_of_the_scripts(root: Path):
    """A script that gets a new command needs a new right."""
    command = re.compile(r"(?:redis\.p?call\(|\btry\('\w+', )'(\w+)'|(?:LPUSH|RPUSH)")
    used = {
        (found[1] or found[0]).lower()
        for path in root.glob("store/lua/*.lua")
        for found in command.finditer(path.read_text())
    }
    given = {rule.removeprefix("+").partition("|")[0] for rule in documented_rights()}
    assert len(used) > 40
    assert used - given == set()


def test_the_documented_rights_do_not_include_administration(limited: tuple[Redis, str]):
    with Redis.from_url(limited[1]) as user:
        for command in (
            "FLUSHALL",
            "CONFIG GET *",
            "KEYS *",
            "SCAN 0",
            "GET other",
            "SHUTDOWN",
            "ACL LIST",
            "CLIENT LIST",
            "CLIENT PAUSE 1",
            "CLIENT KILL ID 1",
            "CLIENT TRACKING ON",
            "CLIENT NO-EVICT ON",
            "SELECT 1",
            "MONITOR",
            "SCRIPT FLUSH",
            "SCRIPT KILL",
            "FUNCTION LIST",
            "PUBSUB CHANNELS",
            "REPLICAOF NO ONE",
            "MODULE LIST",
            "SORT rq:a",
            "SLOWLOG GET",
            "LATENCY RESET",
            "COMMAND",
        ):
            with pytest.raises(NoPermissionError):
                user.execute_command(*command.split())
