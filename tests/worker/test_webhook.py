"""Deliveries as jobs: what is told, when it is tried again, and when it ends. Real Redis, real receivers."""

import base64
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis
from rq.job import JobStatus, Retry
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat
from standardwebhooks import Webhook

import wire
from client.stack import rq, webhook_command
from tests.worker.receiver import Receiver, raw_server, receiver
from worker.job import Job
from worker.webhook import JITTER, SCHEDULE_S, Again, Deliver, Undeliverable, payload, wait_s

SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
SETTINGS = wire.Settings(
    webhook_secret=SECRET, webhook_allow_private=True, public_url="https://pool.example/", webhook_timeout_s=10
)
ID = "0123456789abcdef0123456789abcdef"
ENDED_AT = "2026-11-21T02:37:08.123456Z"


@pytest.fixture
def hook() -> Iterator[Receiver]:
    with receiver() as hook:
        yield hook


@pytest.fixture
def deliver(redis: Redis) -> Iterator[Deliver]:
    deliver = Deliver(SETTINGS, redis)
    yield deliver
    deliver.close()


def end_job(redis: Redis, url: str, job_id: str = ID, status: str = "finished") -> None:
    """A job that has ended, as its worker leaves it."""
    redis.hset(f"rq:job:{job_id}", mapping={"status": status, "model": "demo", "ended_at": ENDED_AT, "webhook": url})


def delivery(redis: Redis, job_id: str = ID) -> Job:
    """Its delivery job, as the API makes it: the hash that is there from the submission on."""
    return Job.create(
        wire.DELIVER,
        args=[],
        kwargs={"job_id": job_id},
        id=wire.Keys.delivery(job_id),
        connection=redis,
        serializer=JSONSerializer,
        origin=wire.WEBHOOKS,
        status=JobStatus.DEFERRED,
        description="webhook",
        timeout=120,
        retry=Retry(max=9, interval=[60]),
        result_ttl=600,
        failure_ttl=600,
    )


def run(deliver: Deliver, job: Job) -> object:
    """What the worker gets from one attempt."""
    pending = deliver(job)
    return pending.finish(pending.future.result(timeout=20))


@pytest.mark.parametrize(
    ("rq_status", "status"),
    [("finished", "finished"), ("failed", "failed"), ("canceled", "canceled"), ("stopped", "canceled")],
)
def test_the_payload_says_how_the_job_ended_and_where_its_result_is(
    redis: Redis, deliver: Deliver, hook: Receiver, rq_status: str, status: str
):
    end_job(redis, hook.url, status=rq_status)
    report = run(deliver, delivery(redis))

    assert isinstance(report, dict)
    assert report["delivered"]
    [received] = hook.received
    assert Webhook(SECRET).verify(received.body, dict(received.headers)) == {
        "type": f"job.{status}",
        "timestamp": ENDED_AT,
        "data": {"id": ID, "status": status, "model": "demo", "url": f"https://pool.example/v1/jobs/{ID}"},
    }


def test_every_attempt_sends_the_same_bytes_under_the_same_id(redis: Redis, deliver: Deliver, hook: Receiver):
    hook.answers = [(500, {}), (204, {})]
    end_job(redis, hook.url)
    job = delivery(redis)
    assert isinstance(run(deliver, job), Again)
    assert not isinstance(run(deliver, job), Again)

    first, second = hook.received
    assert first.body == second.body
    ids = {dict(received.headers)["webhook-id"] for received in hook.received}
    assert ids == {f"wh_{ID}"}
    assert "." not in ids.pop()


def test_the_payload_stays_far_below_20_kilobytes():
    model = "m" * 128
    assert len(payload(ID, "canceled", model, ENDED_AT, "https://pool.example/" + "p" * 2048)) < 20_000


def test_a_failed_attempt_is_tried_again_by_the_schedule_with_jitter(redis: Redis, deliver: Deliver, hook: Receiver):
    hook.answers = [(500, {})]
    end_job(redis, hook.url)
    job = delivery(redis)
    for number, scheduled_s in enumerate(SCHEDULE_S):
        job.number_of_retries = number or None  # as RQ counts
        again = run(deliver, job)
        assert isinstance(again, Again)
        assert scheduled_s <= Retry.get_interval(number, again.intervals) <= scheduled_s * (1 + JITTER)
        assert again.max > number
    job.number_of_retries = len(SCHEDULE_S)
    with pytest.raises(Undeliverable, match=r"given up after 10 attempts: .*HTTP 500"):
        run(deliver, job)
    assert not job.should_retry


def test_the_waits_differ_so_that_receivers_are_not_met_by_all_at_once():
    assert len({wait_s(9, None) for _ in range(20)}) > 1


@pytest.mark.parametrize(
    ("number", "asked_s", "least_s", "most_s"),
    [(1, 120, 120, 120), (1, 10**9, 86_400, 86_400), (2, 1, 300, 360), (1, 0, 5, 6), (9, 86_400, 86_400, 103_680)],
)
def test_retry_after_makes_the_wait_longer_and_never_shorter(number: int, asked_s: int, least_s: int, most_s: int):
    assert least_s <= wait_s(number, asked_s) <= most_s


@pytest.mark.parametrize("status", [429, 503, 500, 302])
def test_retry_after_is_honoured_with_any_failure(redis: Redis, deliver: Deliver, hook: Receiver, status: int):
    hook.answers = [(status, {"Retry-After": "4000"})]
    end_job(redis, hook.url)
    again = run(deliver, delivery(redis))
    assert isinstance(again, Again)
    assert again.intervals == [4000]


def test_gone_ends_the_delivery_for_good(redis: Redis, deliver: Deliver, hook: Receiver):
    hook.answers = [(410, {})]
    end_job(redis, hook.url)
    job = delivery(redis)
    with pytest.raises(Undeliverable, match=r"not to be tried again: .*HTTP 410"):
        run(deliver, job)
    assert not job.should_retry


def test_a_url_that_may_not_be_a_webhook_is_not_tried_again(redis: Redis, deliver: Deliver):
    end_job(redis, "http://user:hush@127.0.0.1/")
    job = delivery(redis)
    with pytest.raises(Undeliverable, match="user name or password") as refusal:
        run(deliver, job)
    assert "hush" not in str(refusal.value)
    assert not job.should_retry


@pytest.mark.parametrize("state", ["deleted", "queued again"])
def test_a_delivery_without_an_ended_job_ends_quietly(redis: Redis, deliver: Deliver, hook: Receiver, state: str):
    if state == "queued again":
        end_job(redis, hook.url, status="queued")
    report = run(deliver, delivery(redis))
    assert isinstance(report, dict)
    assert not isinstance(report, Again)
    assert report["delivered"] is False
    assert hook.received == []


def test_a_slow_receiver_does_not_hold_up_the_others(redis: Redis, deliver: Deliver, hook: Receiver):
    served = threading.Event()
    slow_id = "f" * 32
    end_job(redis, hook.url)
    with raw_server(lambda _connection: served.wait(20) and None) as port:
        end_job(redis, f"http://127.0.0.1:{port}/", job_id=slow_id)
        slow = deliver(delivery(redis, slow_id))
        for _ in range(3):
            run(deliver, delivery(redis))
        assert not slow.future.done()
        served.set()
        assert slow.future.result(timeout=20).status is None
    assert len(hook.received) == 3


# Through `rq worker`.


@contextmanager
def webhook_worker(redis_url: str, root: Path, **settings: str) -> Iterator[subprocess.Popen[str]]:
    environ = {
        **os.environ,
        "PYTHONPATH": str(root),
        "RQ_REDIS_URL": redis_url,
        "SCOREPOOL_REDIS_URL": redis_url,
        "SCOREPOOL_WEBHOOK_SECRET": SECRET,
        "SCOREPOOL_WEBHOOK_ALLOW_PRIVATE": "true",
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
            print(process.communicate(timeout=30)[0])


def release(redis: Redis, job: Job) -> None:
    """As the script does that ends the job."""
    job.save()
    redis.hset(job.key, mapping={"status": "queued", "enqueued_at": utcformat(now())})
    redis.sadd("rq:queues", f"rq:queue:{wire.WEBHOOKS}")
    redis.rpush(f"rq:queue:{wire.WEBHOOKS}", job.id)
    redis.publish(wire.Keys.bell(wire.WEBHOOKS), job.id)


def wait_until(is_so: Callable[[], object], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to be so"
        time.sleep(0.02)


def attempts(redis: Redis, job: Job) -> list[dict[str, object]]:
    """What RQ shows of each attempt, the latest first."""
    return [result.return_value for result in Result.all(job, serializer=JSONSerializer)]


def test_rq_records_every_attempt_and_its_scheduler_brings_the_delivery_back(
    redis: Redis, redis_url: str, root: Path, hook: Receiver
):
    hook.answers = [(503, {}), (204, {})]
    end_job(redis, hook.url)
    job = delivery(redis)
    with webhook_worker(redis_url, root):
        release(redis, job)
        wait_until(lambda: job.get_status() == JobStatus.SCHEDULED)
        assert redis.zcard(f"rq:scheduled:{wire.WEBHOOKS}") == 1
        wait_until(lambda: job.get_status() == JobStatus.FINISHED)

    last, first = attempts(redis, job)
    assert (first["attempt"], first["status"], first["delivered"]) == (1, 503, False)
    assert (last["attempt"], last["status"], last["delivered"]) == (2, 204, True)
    assert isinstance(first["elapsed_ms"], int)
    assert "hush" not in json.dumps([first, last])


def test_a_delivery_survives_the_death_of_its_worker(redis: Redis, redis_url: str, root: Path, hook: Receiver):
    end_job(redis, hook.url)
    job = delivery(redis)
    killed = False

    def die(connection: object) -> None:
        nonlocal killed
        process.kill()
        process.wait()
        killed = True

    with raw_server(die) as port:
        redis.hset(f"rq:job:{ID}", "webhook", f"http://127.0.0.1:{port}/")
        with webhook_worker(redis_url, root) as process:
            release(redis, job)
            wait_until(lambda: killed)
    redis.hset(f"rq:job:{ID}", "webhook", hook.url)
    with webhook_worker(redis_url, root):
        wait_until(lambda: hook.received)
        wait_until(lambda: job.get_status() == JobStatus.FINISHED)
    assert len(hook.received) == 1


def test_a_delivery_that_is_given_up_is_a_failed_job_that_says_why_and_can_be_requeued(
    redis: Redis, redis_url: str, root: Path, hook: Receiver
):
    hook.answers = [(410, {})]
    end_job(redis, hook.url)
    job = delivery(redis)
    with webhook_worker(redis_url, root):
        release(redis, job)
        wait_until(lambda: job.get_status() == JobStatus.FAILED)
    assert redis.zcard(f"rq:failed:{wire.WEBHOOKS}") == 1
    [result] = Result.all(job, serializer=JSONSerializer)
    assert "HTTP 410" in str(result.exc_string)
    assert "hush" not in str(result.exc_string)
    assert len(hook.received) == 1

    hook.answers = [(204, {})]
    subprocess.run([rq(), "requeue", "--queue", wire.WEBHOOKS, "--url", redis_url, job.id], check=True)
    with webhook_worker(redis_url, root):
        wait_until(lambda: job.get_status() == JobStatus.FINISHED)
    assert len(hook.received) == 2


@pytest.mark.parametrize("secret", ["", "hush"])
def test_a_worker_with_a_bad_secret_does_not_start_and_says_why(redis_url: str, root: Path, secret: str):
    with webhook_worker(redis_url, root, SCOREPOOL_WEBHOOK_SECRET=secret) as process:
        said, _ = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "SCOREPOOL_WEBHOOK_SECRET" in said
    assert "whsec_ and the base64 of 24 to 64 bytes" in said


def test_deaths_of_its_worker_only_put_a_delivery_off(redis: Redis, redis_url: str, root: Path):
    job = delivery(redis)
    release(redis, job)
    redis.hset(job.key, "crashes", 5)
    with webhook_worker(redis_url, root):
        wait_until(lambda: job.get_status() == JobStatus.SCHEDULED)
    assert redis.hget(job.key, "crashes") is None  # at the limit no attempt is made: kept, it would be at no later one
