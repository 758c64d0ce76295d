"""Fixtures and helpers: deliveries as the scripts create them, endpoints as the API registers them, webhook workers."""

import base64
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq.serializers import JSONSerializer

from scorepool import store, wire
from scorepool.local.stack import webhook_command
from scorepool.store import scripts
from scorepool.worker.rq.in_flight import AsyncResult
from scorepool.worker.rq.job import Job
from scorepool.worker.webhooks.webhook_worker import Deliverer
from tests.worker.receiver import Receiver, receiver

OPERATOR_SECRET, ENDPOINT_SECRET = ("whsec_" + base64.b64encode(fill * 32).decode() for fill in (b"s", b"o"))
ALICE_SECRET = store.webhook_secrets(OPERATOR_SECRET, "alice", None, 0.0)[0]
SETTINGS = store.Settings(
    webhook_secret=OPERATOR_SECRET, webhook_allow_private=True, public_url="https://pool.example/", webhook_timeout_s=10
)
ENVIRON = {"SCOREPOOL_WEBHOOK_SECRET": OPERATOR_SECRET, "SCOREPOOL_WEBHOOK_ALLOW_PRIVATE": "true"}
JOB_ID = "0123456789abcdef0123456789abcdef"
ENDPOINT_ID = "e" * 16
ENDED_AT = "2026-11-21T02:37:08.123456Z"


@pytest.fixture
def hook() -> Iterator[Receiver]:
    with receiver() as hook:
        yield hook


@pytest.fixture
def deliverer(redis: Redis) -> Iterator[Deliverer]:
    deliverer = Deliverer(SETTINGS, redis)
    yield deliverer
    deliverer.close()


def report_end(redis: Redis, job_id: str, status: str = "finished") -> None:
    """Create the deliveries of a job that has ended, as the scripts that end a job do."""
    redis.hset(f"rq:job:{job_id}", mapping={"status": status, "model": "demo", "ended_at": ENDED_AT, "owner": "alice"})
    redis.eval(f"{scripts.load('outbox.lua')}\nreport_end(ARGV[1], 600)", 0, job_id)


def delivery(redis: Redis, url: str, job_id: str = JOB_ID, status: str = "finished") -> Job:
    """Return the delivery of a job with a webhook, queued and not yet claimed."""
    redis.hset(f"rq:job:{job_id}", "webhook", url)
    report_end(redis, job_id, status)
    return fetch_delivery(redis, store.Keys.delivery(job_id))


def fetch_delivery(redis: Redis, delivery_id: str) -> Job:
    return Job.fetch(delivery_id, connection=redis, serializer=JSONSerializer)


def subscribe(redis: Redis, url: str, owner: str = "alice", **changes: Any) -> wire.Subscriber:
    """Register an endpoint as the API does."""
    endpoint = wire.WebhookEndpoint(
        id=ENDPOINT_ID, url=url, events=list(wire.ALL_EVENTS), description="", created_at=1.0, **changes
    )
    subscriber = wire.Subscriber(endpoint=endpoint, secrets=[wire.SigningSecret(secret=ENDPOINT_SECRET)])
    redis.hset(store.Keys.endpoints_of(owner), endpoint.id, wire.encode_json(subscriber))
    return subscriber


def run_attempt(deliverer: Deliverer, job: Job) -> object:
    """Run one attempt, return its result and store the record, as the worker does."""
    try:
        answer = deliverer(job)
        return answer.finish(answer.future.result(timeout=60)) if isinstance(answer, AsyncResult) else answer
    finally:
        job.connection.hset(job.key, mapping={"retries_left": job.retries_left or 0, **job.extra_fields})
        job.refresh()


@contextmanager
def webhook_worker(redis_url: str, root: Path, **settings: str) -> Iterator[subprocess.Popen[str]]:
    """Run a webhook worker. Its output is printed at the end."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(root),
        "RQ_REDIS_URL": redis_url,
        "SCOREPOOL_REDIS_URL": redis_url,
        **ENVIRON,
        "SCOREPOOL_LEASE_S": "2",
        **settings,
    }
    with subprocess.Popen(
        webhook_command(), env=environ, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            print(process.communicate(timeout=60)[0])
