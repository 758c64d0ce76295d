"""Two deployments on one database: a different SCOREPOOL_REDIS_PREFIX keeps their jobs apart."""

import json
import os
import subprocess
import sys
from pathlib import Path

from redis import Redis

from tests.worker.conftest import Workers, until

SUBMIT = """
import asyncio, json, os, sys
from redis.asyncio import Redis
from scorepool import store, wire
from scorepool.api.repositories.jobs import Jobs
from scorepool.api.repositories.queue import Queue, new_job_ids
async def main():
    redis = Redis.from_url(sys.argv[1])
    queue = Queue(redis, store.Settings.load(), lambda owner: 1, False)
    request = wire.Generate(model="demo", prompt=store.Keys.models, max_tokens=2)
    [job_id] = new_job_ids("alice", "the same key", None)
    await queue.submit("alice", [request], [job_id])
    page = await Jobs(redis).page("alice", None, None, None, 10)
    print(json.dumps({"id": job_id, "listed": [job.id for job in page.jobs]}))
asyncio.run(main())
"""
READ = """
import asyncio, json, sys
from redis.asyncio import Redis
from scorepool.api.repositories.jobs import Jobs
async def main():
    for job_id in sys.argv[2:]:
        try:
            print((await Jobs(Redis.from_url(sys.argv[1])).read("alice", job_id)).status)
        except Exception as error:
            print(type(error).__name__)
asyncio.run(main())
"""


def run(root: Path, code: str, prefix: str, *arguments: str) -> str:
    environ = {**os.environ, "SCOREPOOL_REDIS_PREFIX": prefix}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=root, env=environ, check=True, capture_output=True, text=True, timeout=60).stdout


def test_two_deployments_on_one_database_do_not_share_jobs(redis: Redis, redis_url: str, root: Path, workers: Workers):
    ours, theirs = (json.loads(run(root, SUBMIT, prefix, redis_url)) for prefix in ("scorepool", "other"))
    assert ours["listed"] == [ours["id"]]
    assert theirs["listed"] == [theirs["id"]]
    assert ours["id"] != theirs["id"]
    assert redis.lrange("rq:queue:other::demo", 0, -1) == [theirs["id"].encode()]
    assert {key.decode().partition(":")[0] for key in redis.scan_iter()} == {"rq", "scorepool", "other"}

    workers.start("--burst", SCOREPOOL_REDIS_PREFIX="other").wait(timeout=60)

    assert run(root, READ, "other", redis_url, theirs["id"], ours["id"]).split() == ["finished", "NotFound"]
    assert run(root, READ, "scorepool", redis_url, ours["id"], theirs["id"]).split() == ["queued", "NotFound"]
    workers.start(SCOREPOOL_LEASE_S="2")
    until(lambda: redis.exists(f"scorepool:outcome:{ours['id']}"))
    until(lambda: redis.zcard("scorepool:models") == 1)  # the first heartbeat writes it
    assert not redis.exists("other:models")  # the worker of the other deployment has ended
