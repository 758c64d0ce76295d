"""A job in the second that `appendfsync everysec` may lose is 404 afterwards and can be submitted again."""

import os
from pathlib import Path

import httpx
from redis import Redis

from scorepool.local.redis_server import RedisServer
from tests.api.conftest import score
from tests.api.fake_worker import FakeWorker
from tests.api.test_process import eventually, is_ready, running


def test_a_job_that_redis_lost_is_404_and_its_resubmission_runs(root: Path, tmp_path: Path):
    """The last writes are cut off the append-only file, as after a power cut."""
    with (
        RedisServer(tmp_path / "redis", appendfsync="everysec") as server,
        running(root, server.url, tmp_path / "log") as (http, _),
        Redis.from_url(server.url) as redis,
    ):
        eventually(lambda: is_ready(http))
        FakeWorker(redis).register()
        kept = submit(http, "first")
        eventually(lambda: redis.info("persistence")["aof_pending_bio_fsync"] == 0)
        (aof,) = (tmp_path / "redis").glob("appendonlydir/*.incr.aof")
        durable_bytes = aof.stat().st_size
        lost = submit(http, "second")

        assert server.process is not None
        server.process.kill()
        server.process.wait()
        os.truncate(aof, durable_bytes)
        server.start()

        eventually(lambda: is_ready(http))
        FakeWorker(redis).register()
        assert http.get(f"/v1/jobs/{kept}").json()["status"] == "queued"
        gone = http.get(f"/v1/jobs/{lost}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")
        assert http.get(f"/v1/jobs/{lost}?wait=5").status_code == 404
        assert submit(http, "second") == lost
        assert submit(http, "first") == kept
        FakeWorker(redis).end(lost)
        assert http.get(f"/v1/jobs/{lost}").json()["status"] == "finished"


def submit(http: httpx.Client, key: str) -> str:
    reply = http.post("/v1/jobs", json=score(), headers={"Idempotency-Key": key})
    assert reply.status_code == 202, reply.text
    return str(reply.json()["id"])
