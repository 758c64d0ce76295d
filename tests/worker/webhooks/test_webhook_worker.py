"""Deliveries by `rq worker` processes: the schedule of retries, deaths of workers, deliveries that are given up."""

import json
import subprocess
from pathlib import Path

import pytest
from redis import Redis
from rq.job import JobStatus
from rq.results import Result
from rq.serializers import JSONSerializer

from scorepool import store
from scorepool.local.stack import rq
from scorepool.worker.rq.job import Job
from tests.worker.conftest import Workers, until
from tests.worker.receiver import Receiver, raw_server
from tests.worker.webhooks.conftest import ENVIRON, delivery, webhook_worker


def attempts(redis: Redis, job: Job) -> list[dict[str, object]]:
    """Return the results that RQ recorded of the attempts, latest first."""
    return [result.return_value for result in Result.all(job, serializer=JSONSerializer)]


def test_rq_records_every_attempt_and_its_scheduler_queues_the_next_one(
    redis: Redis, redis_url: str, root: Path, hook: Receiver
):
    hook.answers = [(503, {}), (204, {})]
    job = delivery(redis, hook.url)
    with webhook_worker(redis_url, root):
        until(lambda: job.get_status() == JobStatus.SCHEDULED)
        assert redis.zcard(f"rq:scheduled:{store.WEBHOOKS}") == 1
        until(lambda: job.get_status() == JobStatus.FINISHED)

    last, first = attempts(redis, job)
    assert (first["attempt"], first["status"], first["delivered"]) == (1, 503, False)
    assert (last["attempt"], last["status"], last["delivered"]) == (2, 204, True)
    assert isinstance(first["elapsed_ms"], int)
    assert "hush" not in json.dumps([first, last])


def test_a_delivery_waits_until_the_queue_of_webhooks_is_a_list_again(
    redis: Redis, redis_url: str, root: Path, hook: Receiver
):
    redis.set(f"rq:queue:{store.WEBHOOKS}", "wrong")
    job = delivery(redis, hook.url)
    with webhook_worker(redis_url, root):
        until(lambda: redis.scard("rq:workers"))
        redis.delete(f"rq:queue:{store.WEBHOOKS}")
        until(lambda: job.get_status() == JobStatus.FINISHED)
    assert len(hook.received) == 1


def test_a_delivery_survives_the_death_of_its_worker(redis: Redis, redis_url: str, root: Path, hook: Receiver):
    job = delivery(redis, hook.url)
    killed = False

    def kill_worker(connection: object) -> None:
        nonlocal killed
        process.kill()
        process.wait()
        killed = True

    with raw_server(kill_worker) as port:
        redis.hset(job.key, "url", f"http://127.0.0.1:{port}/")
        with webhook_worker(redis_url, root) as process:
            until(lambda: killed)
    redis.hset(job.key, "url", hook.url)
    with webhook_worker(redis_url, root):
        until(lambda: hook.received)
        until(lambda: job.get_status() == JobStatus.FINISHED)
    assert len(hook.received) == 1


def test_a_delivery_that_failed_for_good_is_a_failed_job_with_a_reason_and_can_be_requeued(
    redis: Redis, redis_url: str, root: Path, hook: Receiver
):
    hook.answers = [(410, {})]
    job = delivery(redis, hook.url)
    with webhook_worker(redis_url, root):
        until(lambda: job.get_status() == JobStatus.FAILED)
    assert redis.zcard(f"rq:failed:{store.WEBHOOKS}") == 1
    [result] = Result.all(job, serializer=JSONSerializer)
    assert "HTTP 410" in str(result.exc_string)
    assert "hush" not in str(result.exc_string)
    assert len(hook.received) == 1

    hook.answers = [(204, {})]
    subprocess.run([rq(), "requeue", "--queue", store.WEBHOOKS, "--url", redis_url, job.id], check=True)
    with webhook_worker(redis_url, root):
        until(lambda: job.get_status() == JobStatus.FINISHED)
    assert len(hook.received) == 2


@pytest.mark.parametrize("secret", ["", "hush"])
def test_a_worker_with_an_invalid_secret_exits_with_a_message(redis_url: str, root: Path, secret: str):
    with webhook_worker(redis_url, root, SCOREPOOL_WEBHOOK_SECRET=secret) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "SCOREPOOL_WEBHOOK_SECRET" in output
    assert "whsec_ and the base64 of 24 to 64 bytes" in output


def test_worker_deaths_do_not_count_against_a_delivery(redis: Redis, redis_url: str, root: Path):
    job = delivery(redis, "http://127.0.0.1:1/")
    redis.hset(job.key, "crashes", 5)
    with webhook_worker(redis_url, root):
        until(lambda: job.get_status() == JobStatus.SCHEDULED)
    assert redis.hget(job.key, "crashes") is None  # at the limit a job does not run, so the count must not be kept


@pytest.mark.parametrize("ahead_s", [3600, -3600], ids=["ahead", "behind"])
def test_a_worker_whose_clock_is_wrong_signs_and_records_the_right_time(
    redis: Redis, workers: Workers, hook: Receiver, ahead_s: int
):
    """Receivers refuse a timestamp that is five minutes off."""
    job = delivery(redis, hook.url)
    workers.start(worker="FakeWebhookWorker", queues=(store.WEBHOOKS,), FAKE_CLOCK_AHEAD_S=str(ahead_s), **ENVIRON)
    until(lambda: job.get_status() == JobStatus.FINISHED)
    now = redis.time()[0]

    assert int(hook.received[0].headers["webhook-timestamp"]) == pytest.approx(now, abs=30)
    [attempt] = json.loads(redis.hget(job.key, "attempts"))
    assert attempt["at"] == pytest.approx(now, abs=30)
