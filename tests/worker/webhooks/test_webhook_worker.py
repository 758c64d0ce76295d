"""Deliveries as jobs: payloads, retries and final failures. Real Redis, real receivers."""

import base64
import dataclasses
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from redis import Redis
from rq.job import JobStatus, Retry
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat
from standardwebhooks import Webhook

from scorepool import store, wire
from scorepool.local.stack import rq, webhook_command
from scorepool.store import scripts
from scorepool.worker.rq.in_flight import AsyncResult
from scorepool.worker.rq.job import Job
from scorepool.worker.webhooks.delivery_record import DeliveryRecord
from scorepool.worker.webhooks.webhook_worker import (
    JITTER,
    MAX_DELIVERY_AGE_S,
    RETRY_DELAYS_S,
    Deliverer,
    RetryLater,
    Undeliverable,
    retry_delay_s,
)
from tests.worker.receiver import Receiver, raw_server, receiver

SECRET, OWN_SECRET = ("whsec_" + base64.b64encode(fill * 32).decode() for fill in (b"s", b"o"))
SETTINGS = store.Settings(
    webhook_secret=SECRET, webhook_allow_private=True, public_url="https://pool.example/", webhook_timeout_s=10
)
ID = "0123456789abcdef0123456789abcdef"
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


def announce(redis: Redis, job_id: str, status: str = "finished") -> None:
    """Create the deliveries of a job that has ended, as the scripts that end a job do."""
    redis.hset(f"rq:job:{job_id}", mapping={"status": status, "model": "demo", "ended_at": ENDED_AT, "owner": "alice"})
    redis.eval(f"{scripts.load('outbox.lua')}\nannounce(ARGV[1], ARGV[2], 600)", 0, job_id, utcformat(now()))


def delivery(redis: Redis, url: str, job_id: str = ID, status: str = "finished") -> Job:
    """Return the delivery of a job with a webhook, queued and not yet claimed."""
    redis.hset(f"rq:job:{job_id}", "webhook", url)
    announce(redis, job_id, status)
    return fetch(redis, store.Keys.delivery(job_id))


def fetch(redis: Redis, delivery_id: str) -> Job:
    return Job.fetch(delivery_id, connection=redis, serializer=JSONSerializer)


def subscribe(redis: Redis, url: str, owner: str = "alice", **changes: Any) -> wire.Subscriber:
    """Register an endpoint as the API does."""
    endpoint = wire.WebhookEndpoint(
        id="e" * 16, url=url, events=list(wire.ALL_EVENTS), description="", created_at=1.0, **changes
    )
    subscriber = wire.Subscriber(endpoint=endpoint, secrets=[wire.SigningSecret(secret=OWN_SECRET)])
    redis.hset(store.Keys.endpoints(owner), endpoint.id, wire.encode_json(subscriber))
    return subscriber


def run(deliverer: Deliverer, job: Job) -> object:
    """Run one attempt, return its result and store the record, as the worker does."""
    try:
        answer = deliverer(job)
        return answer.finish(answer.future.result(timeout=60)) if isinstance(answer, AsyncResult) else answer
    finally:
        job.connection.hset(job.key, mapping={"retries_left": job.retries_left or 0, **job.extra_fields})
        job.refresh()


@pytest.mark.parametrize(
    ("rq_status", "status"),
    [("finished", "finished"), ("failed", "failed"), ("canceled", "canceled"), ("stopped", "canceled")],
)
def test_the_payload_names_the_status_of_the_job_and_the_url_of_its_result(
    redis: Redis, deliverer: Deliverer, hook: Receiver, rq_status: str, status: str
):
    report = run(deliverer, delivery(redis, hook.url, status=rq_status))

    assert isinstance(report, dict)
    assert report["delivered"]
    [received] = hook.received
    assert Webhook(SECRET).verify(received.body, dict(received.headers)) == {
        "type": f"job.{status}",
        "timestamp": ENDED_AT,
        "data": {"id": ID, "status": status, "model": "demo", "url": f"https://pool.example/v1/jobs/{ID}"},
    }


def test_every_attempt_sends_the_same_bytes_under_the_same_id(redis: Redis, deliverer: Deliverer, hook: Receiver):
    hook.answers = [(500, {}), (204, {})]
    job = delivery(redis, hook.url)
    redis.delete(f"rq:job:{ID}")  # it may expire long before the last retry
    assert isinstance(run(deliverer, job), RetryLater)
    assert not isinstance(run(deliverer, job), RetryLater)

    first, second = hook.received
    assert first.body == second.body
    ids = {dict(received.headers)["webhook-id"] for received in hook.received}
    assert ids == {f"wh_{ID}"}
    assert "." not in ids.pop()


def test_the_payload_is_smaller_than_20_kilobytes(redis: Redis, hook: Receiver):
    record = dataclasses.replace(DeliveryRecord.from_job(delivery(redis, hook.url)), model="m" * 128)
    assert len(record.payload(store.Settings(public_url="https://pool.example/" + "p" * 2048))) < 20_000


def test_failed_attempts_follow_the_schedule_with_jitter(redis: Redis, deliverer: Deliverer, hook: Receiver):
    hook.answers = [(500, {})]
    job = delivery(redis, hook.url)
    for number, scheduled_s in enumerate(RETRY_DELAYS_S):
        again = run(deliverer, job)
        assert isinstance(again, RetryLater)
        assert scheduled_s <= Retry.get_interval(number, again.intervals) <= scheduled_s * (1 + JITTER)
        assert again.max > 100 * number
    with pytest.raises(Undeliverable, match=r"given up after 10 attempts: .*HTTP 500"):
        run(deliverer, job)
    assert not job.should_retry
    assert [attempt.status for attempt in DeliveryRecord.from_job(job).attempts] == [500] * 10


def test_retry_delays_have_jitter():
    assert len({retry_delay_s(9, None) for _ in range(20)}) > 1


@pytest.mark.parametrize(
    ("number", "asked_s", "least_s", "most_s"),
    [(1, 120, 120, 120), (1, 10**9, 86_400, 86_400), (2, 1, 300, 360), (1, 0, 5, 6), (9, 86_400, 86_400, 103_680)],
)
def test_retry_after_only_lengthens_the_delay(number: int, asked_s: int, least_s: int, most_s: int):
    assert least_s <= retry_delay_s(number, asked_s) <= most_s


@pytest.mark.parametrize("status", [429, 503, 500, 302])
def test_retry_after_is_honoured_with_any_failure(redis: Redis, deliverer: Deliverer, hook: Receiver, status: int):
    hook.answers = [(status, {"Retry-After": "4000"})]
    again = run(deliverer, delivery(redis, hook.url))
    assert isinstance(again, RetryLater)
    assert again.intervals == [4000]


def test_http_410_is_not_tried_again(redis: Redis, deliverer: Deliverer, hook: Receiver):
    hook.answers = [(410, {})]
    job = delivery(redis, hook.url)
    with pytest.raises(Undeliverable, match=r"not to be tried again: .*HTTP 410"):
        run(deliverer, job)
    assert not job.should_retry


def test_an_invalid_webhook_url_is_not_tried_again(redis: Redis, deliverer: Deliverer):
    job = delivery(redis, "http://user:hush@127.0.0.1/")
    with pytest.raises(Undeliverable, match="user name or password") as refusal:
        run(deliverer, job)
    assert "hush" not in str(refusal.value)
    assert not job.should_retry


def test_a_job_that_runs_again_and_ends_again_sends_another_event(redis: Redis, deliverer: Deliverer, hook: Receiver):
    first = delivery(redis, hook.url, status="failed")
    announce(redis, ID, "finished")
    second = fetch(redis, f"wh_{ID}-2")
    for job in (first, second):
        run(deliverer, job)
    sent = [(received.headers["webhook-id"], json.loads(received.body)["type"]) for received in hook.received]
    assert sent == [(f"wh_{ID}", "job.failed"), (f"wh_{ID}-2", "job.finished")]


def test_a_slow_receiver_does_not_delay_others(redis: Redis, deliverer: Deliverer, hook: Receiver):
    served = threading.Event()
    with raw_server(lambda _connection: served.wait(60) and None) as port:
        slow = deliverer(delivery(redis, f"http://127.0.0.1:{port}/", job_id="f" * 32))
        assert isinstance(slow, AsyncResult)
        for number in range(3):
            run(deliverer, delivery(redis, hook.url, job_id=str(number) * 32))
        assert not slow.future.done()
        served.set()
        assert slow.future.result(timeout=60).status is None
    assert len(hook.received) == 3


def test_a_postponed_delivery_is_not_an_attempt_and_fails_after_days(redis: Redis, hook: Receiver):
    deliverer = Deliverer(replace(SETTINGS, webhook_max_in_flight=1), redis)
    job = delivery(redis, hook.url)
    assert deliverer._limiter.acquire("alice", f"127.0.0.1:{hook.port}") == 0.0
    again = run(deliverer, job)
    assert isinstance(again, RetryLater)
    assert again["put_off_s"] >= 1
    assert DeliveryRecord.from_job(job).num_attempts == 0
    assert hook.received == []

    redis.hset(job.key, "since", time.time() - MAX_DELIVERY_AGE_S - 1)
    job.refresh()
    with pytest.raises(Undeliverable, match="not answered for days"):
        run(deliverer, job)
    assert b"not answered for days" in redis.hget(job.key, "reason")
    deliverer.close()


@pytest.mark.parametrize(
    "fields",
    [{"event": "dance"}, {"since": "soon"}, {"attempts": "[1]"}, {"attempts": b"\x80\x04"}, {"owner": b"\xff"}],
)
def test_a_record_that_cannot_be_decoded_fails_its_delivery_only(
    redis: Redis, deliverer: Deliverer, hook: Receiver, fields: dict[str, str | bytes]
):
    job = delivery(redis, hook.url)
    redis.hset(job.key, mapping=fields)
    job.refresh()
    with pytest.raises(Undeliverable, match="cannot be read"):
        run(deliverer, job)
    assert hook.received == []


# Deliveries to registered endpoints.


def test_an_event_goes_to_the_webhook_of_the_job_and_to_every_endpoint_that_subscribes_to_it(
    redis: Redis, deliverer: Deliverer, hook: Receiver
):
    subscriber = subscribe(redis, hook.url)
    for number, changes in enumerate([{"events": ["job.failed"]}, {"disabled_at": 1.0}]):
        other = replace(subscriber.endpoint, id=str(number) * 16, **changes)
        redis.hset(store.Keys.endpoints("alice"), other.id, wire.encode_json(replace(subscriber, endpoint=other)))
    subscribe(redis, hook.url, owner="bob")
    run(deliverer, delivery(redis, hook.url))
    run(deliverer, fetch(redis, f"wh_{ID}_{'e' * 16}"))

    own, endpoint = hook.received
    assert own.body == endpoint.body
    Webhook(SECRET).verify(own.body, dict(own.headers))
    Webhook(OWN_SECRET).verify(endpoint.body, dict(endpoint.headers))
    assert own.headers["webhook-id"] != endpoint.headers["webhook-id"]
    assert redis.llen("rq:queue:webhooks") == 2
    assert redis.zcard(store.Keys.deliveries("alice")) == 2


def test_every_field_that_the_outbox_reads_is_a_field_of_a_subscriber():
    lua = scripts.load("outbox.lua")
    of_subscriber = set(re.findall(r"cjson\.decode\(text\)\.(\w+)", lua))
    of_endpoint = set(re.findall(r"\bendpoint\.(\w+)", lua))
    assert (of_subscriber, of_endpoint) == ({"endpoint"}, {"id", "events", "disabled_at"})
    assert of_subscriber <= {*wire.Subscriber.__struct_fields__}
    assert of_endpoint <= {*wire.WebhookEndpoint.__struct_fields__}


@pytest.mark.parametrize(
    ("changes", "num_deliveries"), [({}, 1), ({"events": ["job.failed"]}, 0), ({"disabled_at": 1.0}, 0)]
)
def test_the_outbox_reads_a_subscriber_as_it_is_encoded(redis: Redis, changes: dict[str, Any], num_deliveries: int):
    subscriber = subscribe(redis, "https://hooks.example/")
    changed = replace(subscriber, endpoint=replace(subscriber.endpoint, **changes))
    redis.hset(store.Keys.endpoints("alice"), subscriber.endpoint.id, wire.encode_json(changed))
    announce(redis, ID)
    assert redis.llen("rq:queue:webhooks") == num_deliveries


@pytest.mark.parametrize(
    "text", ["[", "7", "{}", '{"endpoint": 5}', '{"endpoint": {"id": [], "events": ["job.finished"]}}']
)
def test_an_endpoint_that_cannot_be_decoded_does_not_keep_a_job_from_ending(redis: Redis, hook: Receiver, text: str):
    redis.hset(store.Keys.endpoints("alice"), "x", text)
    subscribe(redis, hook.url)
    announce(redis, ID)
    assert redis.lrange("rq:queue:webhooks", 0, -1) == [f"wh_{ID}_{'e' * 16}".encode()]


def test_a_rotated_secret_signs_until_it_expires(redis: Redis, hook: Receiver):
    subscriber = subscribe(redis, hook.url)
    new = "whsec_" + base64.b64encode(b"n" * 32).decode()
    for expires_at, signs in [(time.time() + 60, True), (time.time() - 60, False)]:
        old = wire.SigningSecret(secret=OWN_SECRET, expires_at=expires_at)
        rotated = replace(subscriber, secrets=[wire.SigningSecret(secret=new), old])
        redis.hset(store.Keys.endpoints("alice"), subscriber.endpoint.id, wire.encode_json(rotated))
        announce(redis, ID)
        deliverer = Deliverer(SETTINGS, redis)
        [*_, id_] = redis.lrange("rq:queue:webhooks", 0, -1)
        run(deliverer, fetch(redis, id_.decode()))
        deliverer.close()
        received = hook.received[-1]
        Webhook(new).verify(received.body, dict(received.headers))
        assert len(received.headers["webhook-signature"].split()) == 1 + signs
        if signs:
            Webhook(OWN_SECRET).verify(received.body, dict(received.headers))


def test_http_410_disables_the_endpoint_until_its_owner_enables_it(redis: Redis, hook: Receiver):
    hook.answers = [(410, {})]
    subscriber = subscribe(redis, hook.url)
    deliverer = Deliverer(SETTINGS, redis)
    announce(redis, ID)
    job = fetch(redis, f"wh_{ID}_{'e' * 16}")
    with pytest.raises(Undeliverable, match="HTTP 410"):
        run(deliverer, job)
    deliverer.close()

    stored = wire.parse(redis.hget(store.Keys.endpoints("alice"), subscriber.endpoint.id), wire.Subscriber)
    assert stored.endpoint.disabled_at == pytest.approx(time.time(), abs=60)
    assert "410" in str(stored.endpoint.disabled_reason)
    assert stored.secrets == subscriber.secrets
    announce(redis, "f" * 32)
    assert redis.llen("rq:queue:webhooks") == 1  # no event reaches it from now on

    deliverer = Deliverer(SETTINGS, redis)
    with pytest.raises(Undeliverable, match="disabled: the receiver answered HTTP 410"):
        run(deliverer, job)
    redis.hset(store.Keys.endpoints("alice"), subscriber.endpoint.id, wire.encode_json(stored.as_enabled()))
    deliverer.close()
    deliverer = Deliverer(SETTINGS, redis)
    hook.answers = [(204, {})]
    run(deliverer, job)
    deliverer.close()
    assert len(hook.received) == 2


def test_a_delivery_to_an_endpoint_that_was_deleted_fails(redis: Redis, deliverer: Deliverer, hook: Receiver):
    subscriber = subscribe(redis, hook.url)
    announce(redis, ID)
    redis.hdel(store.Keys.endpoints("alice"), subscriber.endpoint.id)
    with pytest.raises(Undeliverable, match="its endpoint was deleted"):
        run(deliverer, fetch(redis, f"wh_{ID}_{'e' * 16}"))
    assert hook.received == []


# Deliveries by an `rq worker` process.


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
            print(process.communicate(timeout=60)[0])


def wait_until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)


def attempts(redis: Redis, job: Job) -> list[dict[str, object]]:
    """Return the results that RQ recorded of the attempts, latest first."""
    return [result.return_value for result in Result.all(job, serializer=JSONSerializer)]


def test_rq_records_every_attempt_and_its_scheduler_queues_the_next_one(
    redis: Redis, redis_url: str, root: Path, hook: Receiver
):
    hook.answers = [(503, {}), (204, {})]
    job = delivery(redis, hook.url)
    with webhook_worker(redis_url, root):
        wait_until(lambda: job.get_status() == JobStatus.SCHEDULED)
        assert redis.zcard(f"rq:scheduled:{store.WEBHOOKS}") == 1
        wait_until(lambda: job.get_status() == JobStatus.FINISHED)

    last, first = attempts(redis, job)
    assert (first["attempt"], first["status"], first["delivered"]) == (1, 503, False)
    assert (last["attempt"], last["status"], last["delivered"]) == (2, 204, True)
    assert isinstance(first["elapsed_ms"], int)
    assert "hush" not in json.dumps([first, last])


def test_a_delivery_survives_the_death_of_its_worker(redis: Redis, redis_url: str, root: Path, hook: Receiver):
    job = delivery(redis, hook.url)
    killed = False

    def die(connection: object) -> None:
        nonlocal killed
        process.kill()
        process.wait()
        killed = True

    with raw_server(die) as port:
        redis.hset(job.key, "url", f"http://127.0.0.1:{port}/")
        with webhook_worker(redis_url, root) as process:
            wait_until(lambda: killed)
    redis.hset(job.key, "url", hook.url)
    with webhook_worker(redis_url, root):
        wait_until(lambda: hook.received)
        wait_until(lambda: job.get_status() == JobStatus.FINISHED)
    assert len(hook.received) == 1


def test_a_delivery_that_failed_for_good_is_a_failed_job_with_a_reason_and_can_be_requeued(
    redis: Redis, redis_url: str, root: Path, hook: Receiver
):
    hook.answers = [(410, {})]
    job = delivery(redis, hook.url)
    with webhook_worker(redis_url, root):
        wait_until(lambda: job.get_status() == JobStatus.FAILED)
    assert redis.zcard(f"rq:failed:{store.WEBHOOKS}") == 1
    [result] = Result.all(job, serializer=JSONSerializer)
    assert "HTTP 410" in str(result.exc_string)
    assert "hush" not in str(result.exc_string)
    assert len(hook.received) == 1

    hook.answers = [(204, {})]
    subprocess.run([rq(), "requeue", "--queue", store.WEBHOOKS, "--url", redis_url, job.id], check=True)
    with webhook_worker(redis_url, root):
        wait_until(lambda: job.get_status() == JobStatus.FINISHED)
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
        wait_until(lambda: job.get_status() == JobStatus.SCHEDULED)
    assert redis.hget(job.key, "crashes") is None  # at the limit a job does not run, so the count must not be kept
