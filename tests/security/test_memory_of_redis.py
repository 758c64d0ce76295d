"""A tenant that fills Redis stops nobody: accepted jobs end, and what frees memory goes on when there is none left."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from scorepool.local.redis_server import RedisServer
from tests.api.conftest import ALICE, BOB, KEYS, bearer, generate
from tests.api.test_process import eventually, running, serves
from tests.worker.conftest import Workers, done

LIMIT_BYTES = 32 * 2**20


def unserved(size_bytes: int) -> dict[str, Any]:
    """Return a job that waits for a model that nobody serves."""
    return generate(prompt="a" * size_bytes, model="nobody-serves-this", wait_for_model=True)


@dataclass(frozen=True)
class Stack:
    redis: Redis
    http: httpx.Client
    workers: Workers
    api_log: Path

    def submit(self, key: str, **changes: object) -> httpx.Response:
        return self.http.post("/v1/jobs", json=generate() | changes, headers=bearer(key))

    def status(self, key: str, job_id: str) -> str:
        return str(self.http.get(f"/v1/jobs/{job_id}", headers=bearer(key)).json()["status"])

    def share(self) -> float:
        info = self.redis.info("memory")
        return float(info["used_memory"] / info["maxmemory"])

    def fill(self, share: float) -> None:
        """Fill a share of the memory with something that is no job."""
        while self.share() < share:
            self.redis.rpush("filler", b"x" * 2**18)

    def fill_until_refused(self, key: str) -> httpx.Response:
        """Submit ever smaller jobs until the smallest is refused."""
        for size_bytes in (500_000, 50_000, 5_000, 1):
            while (reply := self.submit(key, **unserved(size_bytes))).status_code == 202:
                assert self.share() < 1
        return reply


@pytest.fixture(scope="module")
def stack(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Run a Redis with a small limit, the API and a worker, for all tests of this module."""
    tmp_path = tmp_path_factory.mktemp("memory")
    with (
        RedisServer(tmp_path / "redis", maxmemory_bytes=LIMIT_BYTES) as server,
        Redis.from_url(server.url) as redis,
        running(root, server.url, tmp_path / "api", api_keys=KEYS) as (http, _),
        Workers(server.url, root, tmp_path) as workers,
    ):
        workers.start("--name", "mac", SCOREPOOL_LEASE_S="5")
        eventually(lambda: serves(http, "demo"))
        yield Stack(redis, http, workers, tmp_path / "api")


def test_accepted_jobs_of_others_end_while_one_tenant_fills_redis(stack: Stack):
    stack.fill(0.7)
    waiting = [stack.submit(BOB, max_tokens=200).json()["id"] for _ in range(5)]
    refused = stack.fill_until_refused(ALICE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "redis_full")
    assert "maxmemory" in refused.json()["error"]["message"]
    assert 0.7 < stack.share() < 0.9
    stack.fill(0.82)
    upload = {"files": {"file": ("a.jsonl", b"{}\n" * 100)}, "data": {"purpose": "batch"}}
    assert stack.http.post("/v1/files", **upload, headers=bearer(ALICE)).status_code == 503
    for job_id in waiting:
        eventually(lambda job_id=job_id: stack.status(BOB, job_id) == "finished")
    assert stack.share() > 0.7
    stack.redis.delete("filler")


def test_without_memory_running_jobs_end_waiting_ones_are_kept_and_memory_can_be_freed(stack: Stack):
    ended = stack.submit(BOB, max_tokens=2).json()["id"]
    eventually(lambda: stack.status(BOB, ended) == "finished")
    large = [stack.submit(ALICE, **unserved(500_000)).json()["id"] for _ in range(3)]
    runs = stack.submit(BOB, max_tokens=300).json()["id"]
    eventually(lambda: stack.status(BOB, runs) == "started")
    stack.redis.config_set("maxmemory", stack.redis.info("memory")["used_memory"] // 2)

    assert stack.submit(BOB).status_code == 503
    eventually(lambda: stack.status(BOB, runs) == "finished")
    assert stack.http.get(f"/v1/jobs/{runs}", headers=bearer(BOB)).json()["result"]["sequences"]
    assert stack.http.delete(f"/v1/jobs/{ended}", headers=bearer(BOB)).status_code == 204
    assert stack.http.post(f"/v1/jobs/{large[0]}/cancel", headers=bearer(ALICE)).status_code in (200, 202)
    assert stack.http.delete(f"/v1/jobs/{large[0]}", headers=bearer(ALICE)).status_code == 204
    assert stack.share() > 1

    stack.redis.config_set("maxmemory", LIMIT_BYTES)
    last = stack.submit(BOB, max_tokens=2).json()["id"]
    eventually(lambda: stack.status(BOB, last) == "finished")
    assert [done(stack.redis).count(job_id) for job_id in (runs, last)] == [1, 1]
    assert "Traceback" not in stack.workers.log + stack.api_log.read_text()


def test_no_job_begins_in_the_memory_that_is_kept_for_results(stack: Stack):
    def last_claim() -> bytes | None:
        return stack.redis.hget("rq:worker:mac", "last_claim")

    stack.redis.set("rq:suspended", 1)
    waits = stack.submit(BOB, max_tokens=2).json()["id"]
    stack.fill(0.92)
    assert 0.9 < stack.share() < 1
    stack.redis.delete("rq:suspended")
    for _ in range(3):
        before = last_claim()
        eventually(lambda before=before: last_claim() != before)
        assert stack.status(BOB, waits) == "queued"
    stack.redis.delete("filler")
    eventually(lambda: stack.status(BOB, waits) == "finished")
