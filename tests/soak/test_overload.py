"""Under ten times the worker's rate memory stays flat, 429 has Retry-After, and accepted jobs keep their order."""

import time
from pathlib import Path

import httpx
import pytest
from redis import Redis

from scorepool.local.redis_server import RedisServer
from tests.api.conftest import generate
from tests.api.test_process import eventually, running, serves
from tests.soak.memory import rss_bytes
from tests.worker.conftest import Workers, done

WARM_UP_S = 40.0  # after it, results expire as fast as they are written
DURATION_S = 600.0
RESULT_TTL_S = 20
BULK = 20
BULK_PERIOD_S = 0.025  # 800 jobs/s; the worker finishes 4 every 0.05 s


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_overload_keeps_memory_flat_and_jobs_in_order(root: Path, tmp_path: Path):
    (tmp_path / "workers").mkdir()
    settings = {"max_queue_depth": "500", "result_ttl_s": str(RESULT_TTL_S)}
    with (
        RedisServer(tmp_path / "redis") as server,
        Redis.from_url(server.url) as redis,
        running(root, server.url, tmp_path / "log", **settings) as (http, api),
        Workers(server.url, root, tmp_path / "workers") as workers,
    ):
        workers.start(SCOREPOOL_MAX_JOBS_IN_FLIGHT="4", FAKE_STEP_S="0.05", SCOREPOOL_LEASE_S="20")
        eventually(lambda: serves(http, "demo"))
        started_at = time.monotonic()
        accepted, refused = overload(http, started_at + WARM_UP_S)
        before = rss_bytes(api.pid), redis.info("memory")["used_memory"]
        more_accepted, more_refused = overload(http, started_at + DURATION_S)
        after = rss_bytes(api.pid), redis.info("memory")["used_memory"]
        ended = done(redis)

    accepted += more_accepted
    refused += more_refused
    print(f"accepted {len(accepted)}, refused {len(refused) * BULK}, Retry-After {min(refused)} to {max(refused)} s")
    for name, first, last in zip(("API, RSS", "Redis"), before, after, strict=True):
        print(f"{name}: {first / 2**20:.1f} -> {last / 2**20:.1f} MiB")
    assert len(refused) * BULK > 5 * len(accepted)
    assert after[0] - before[0] < 16 * 2**20
    assert after[1] - before[1] < 4 * 2**20  # the registry of ended jobs is cleaned every ten minutes
    assert len(ended) > 1000
    ended_set = set(ended)
    assert [job_id for job_id in accepted if job_id in ended_set] == ended
    assert max(refused) <= 2


def overload(http: httpx.Client, until: float) -> tuple[list[str], list[int]]:
    """Submit until the time `until`. Return the accepted ids in order, and the Retry-After of each refusal."""
    accepted: list[str] = []
    refused: list[int] = []
    jobs = [generate(max_tokens=1)] * BULK
    due = time.monotonic()
    while time.monotonic() < until:
        reply = http.post("/v1/jobs/bulk", json=jobs)
        if reply.status_code == 202:
            accepted += [job["id"] for job in reply.json()]
        else:
            assert reply.status_code == 429, reply.text
            refused.append(int(reply.headers["retry-after"]))
        due += BULK_PERIOD_S
        time.sleep(max(0.0, due - time.monotonic()))
    return accepted, refused
