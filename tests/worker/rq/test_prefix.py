"""Two deployments on one database: different values of SCOREPOOL_REDIS_PREFIX keep jobs, models and webhooks apart."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis import Redis

from tests.worker.conftest import Workers, until
from tests.worker.receiver import receiver
from tests.worker.webhooks.conftest import ENVIRON, webhook_worker

SUBMIT = """
import asyncio, json, os, sys
from redis.asyncio import Redis
from scorepool import store, wire
from scorepool.api.repositories.jobs import Jobs
from scorepool.api.repositories.stored_results import StoredResults
from scorepool.api.repositories.queue import Queue
async def main():
    redis = Redis.from_url(sys.argv[1])
    queue = Queue(redis, store.Settings.load(), lambda owner: 1, False)
    webhook = sys.argv[2] if len(sys.argv) > 2 else None
    request = wire.Generate(model="demo", prompt=store.Keys.models, max_tokens=2, webhook=webhook)
    [job_id] = await queue.job_ids("alice", "the same key", None)
    await queue.submit("alice", [request], [job_id])
    page = await Jobs(redis, StoredResults(redis, None)).page("alice", None, 10)
    print(json.dumps({"id": job_id, "listed": [job.id for job in page.jobs]}))
asyncio.run(main())
"""
REGISTER = """
import asyncio, sys
from redis.asyncio import Redis
from scorepool import store, wire
from scorepool.api.repositories.webhook_endpoints import WebhookEndpoints
registration = wire.EndpointRegistration(url=sys.argv[2])
asyncio.run(WebhookEndpoints(Redis.from_url(sys.argv[1]), store.Settings.load()).register("alice", registration))
"""
READ = """
import asyncio, json, sys
from redis.asyncio import Redis
from scorepool.api.repositories.jobs import Jobs
from scorepool.api.repositories.stored_results import StoredResults
async def main():
    redis = Redis.from_url(sys.argv[1])
    jobs = Jobs(redis, StoredResults(redis, None))
    for job_id in sys.argv[2:]:
        try:
            print((await jobs.read_state("alice", job_id)).status)
        except Exception as error:
            print(type(error).__name__)
asyncio.run(main())
"""


def run(root: Path, code: str, prefix: str, *arguments: str) -> str:
    environ = {**os.environ, **ENVIRON, "SCOREPOOL_REDIS_PREFIX": prefix}
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


@pytest.mark.soak
def test_two_deployments_on_one_database_send_their_own_webhooks_only(
    redis: Redis, redis_url: str, root: Path, workers: Workers
):
    prefixes = ("scorepool", "other")
    with ExitStack() as stack:
        receivers = {prefix: stack.enter_context(receiver()) for prefix in prefixes}
        for prefix, hook in receivers.items():
            run(root, REGISTER, prefix, redis_url, hook.url)
            hook.answers = [(503, {}), (204, {})]  # the first attempt of one of the two deliveries fails
            stack.enter_context(webhook_worker(redis_url, root, SCOREPOOL_REDIS_PREFIX=prefix))
            workers.start("--with-scheduler", SCOREPOOL_REDIS_PREFIX=prefix)
        until(lambda: redis.scard("rq:workers") == 4)
        ids = {p: json.loads(run(root, SUBMIT, p, redis_url, hook.url))["id"] for p, hook in receivers.items()}

        until(lambda: [redis.zcard(f"rq:finished:{queue}") for queue in ("webhooks", "other::webhooks")] == [2, 2])

    for prefix, hook in receivers.items():
        events = [json.loads(received.body) for received in hook.received]
        assert [(event["type"], event["data"]["id"]) for event in events] == [("job.finished", ids[prefix])] * 3
        assert [fields[b"id"] for _, fields in redis.xrange(f"{prefix}:done")] == [ids[prefix].encode()]
        assert redis.zcard(f"{prefix}:deliveries:alice") == 2
    queues = {f"rq:queue:{name}" for name in ("demo", "webhooks", "other::demo", "other::webhooks")}
    assert {key.decode() for key in redis.smembers("rq:queues")} == queues
    keys = [key.decode() for key in redis.scan_iter()]
    assert not [key for key in keys if ids["scorepool"] in key and "other:" in key]
    assert not [key for key in keys if ids["other"] in key and key.startswith("scorepool:")]
