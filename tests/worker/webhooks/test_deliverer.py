"""Attempts of deliveries: payloads, the schedule of retries, final failures. Real Redis, real receivers."""

import dataclasses
import json
import threading
import time

import pytest
from msgspec.structs import replace
from redis import Redis
from rq.job import Retry
from standardwebhooks import Webhook

from scorepool import store
from scorepool.worker.rq.in_flight import AsyncResult
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
from tests.worker.receiver import Receiver, raw_server
from tests.worker.webhooks.conftest import (
    ALICE_SECRET,
    ENDED_AT,
    JOB_ID,
    SETTINGS,
    delivery,
    fetch_delivery,
    report_end,
    run_attempt,
)


@pytest.mark.parametrize(
    ("rq_status", "status"),
    [("finished", "finished"), ("failed", "failed"), ("canceled", "canceled"), ("stopped", "canceled")],
)
def test_the_payload_names_the_status_of_the_job_and_the_url_of_its_result(
    redis: Redis, deliverer: Deliverer, hook: Receiver, rq_status: str, status: str
):
    report = run_attempt(deliverer, delivery(redis, hook.url, status=rq_status))

    assert isinstance(report, dict)
    assert report["delivered"]
    [received] = hook.received
    assert Webhook(ALICE_SECRET).verify(received.body, dict(received.headers)) == {
        "type": f"job.{status}",
        "timestamp": ENDED_AT,
        "data": {"id": JOB_ID, "status": status, "model": "demo", "url": f"https://pool.example/v1/jobs/{JOB_ID}"},
    }


def test_every_attempt_sends_the_same_bytes_under_the_same_id(redis: Redis, deliverer: Deliverer, hook: Receiver):
    hook.answers = [(500, {}), (204, {})]
    job = delivery(redis, hook.url)
    redis.delete(f"rq:job:{JOB_ID}")  # it may expire long before the last retry
    assert isinstance(run_attempt(deliverer, job), RetryLater)
    assert not isinstance(run_attempt(deliverer, job), RetryLater)

    first, second = hook.received
    assert first.body == second.body
    ids = {dict(received.headers)["webhook-id"] for received in hook.received}
    assert ids == {f"wh_{JOB_ID}"}
    assert "." not in ids.pop()


def test_the_payload_is_smaller_than_20_kilobytes(redis: Redis, hook: Receiver):
    record = dataclasses.replace(DeliveryRecord.from_job(delivery(redis, hook.url)), model="m" * 128)
    assert len(record.payload(store.Settings(public_url="https://pool.example/" + "p" * 2048))) < 20_000


def test_failed_attempts_follow_the_schedule_with_jitter(redis: Redis, deliverer: Deliverer, hook: Receiver):
    hook.answers = [(500, {})]
    job = delivery(redis, hook.url)
    for number, scheduled_s in enumerate(RETRY_DELAYS_S):
        again = run_attempt(deliverer, job)
        assert isinstance(again, RetryLater)
        assert scheduled_s <= Retry.get_interval(number, again.intervals) <= scheduled_s * (1 + JITTER)
        assert again.max > 100 * number
    with pytest.raises(Undeliverable, match=r"given up after 10 attempts: .*HTTP 500"):
        run_attempt(deliverer, job)
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
    again = run_attempt(deliverer, delivery(redis, hook.url))
    assert isinstance(again, RetryLater)
    assert again.intervals == [4000]


def test_http_410_is_not_tried_again(redis: Redis, deliverer: Deliverer, hook: Receiver):
    hook.answers = [(410, {})]
    job = delivery(redis, hook.url)
    with pytest.raises(Undeliverable, match=r"not to be tried again: .*HTTP 410"):
        run_attempt(deliverer, job)
    assert not job.should_retry


def test_an_invalid_webhook_url_is_not_tried_again(redis: Redis, deliverer: Deliverer):
    job = delivery(redis, "http://user:hush@127.0.0.1/")
    with pytest.raises(Undeliverable, match="user name or password") as refusal:
        run_attempt(deliverer, job)
    assert "hush" not in str(refusal.value)
    assert not job.should_retry


def test_a_job_that_runs_again_and_ends_again_sends_another_event(redis: Redis, deliverer: Deliverer, hook: Receiver):
    first = delivery(redis, hook.url, status="failed")
    report_end(redis, JOB_ID, "finished")
    second = fetch_delivery(redis, f"wh_{JOB_ID}-2")
    for job in (first, second):
        run_attempt(deliverer, job)
    sent = [(received.headers["webhook-id"], json.loads(received.body)["type"]) for received in hook.received]
    assert sent == [(f"wh_{JOB_ID}", "job.failed"), (f"wh_{JOB_ID}-2", "job.finished")]


def test_a_slow_receiver_does_not_delay_others(redis: Redis, deliverer: Deliverer, hook: Receiver):
    served = threading.Event()
    with raw_server(lambda _connection: served.wait(60) and None) as port:
        slow = deliverer(delivery(redis, f"http://127.0.0.1:{port}/", job_id="f" * 32))
        assert isinstance(slow, AsyncResult)
        for number in range(3):
            run_attempt(deliverer, delivery(redis, hook.url, job_id=str(number) * 32))
        assert not slow.future.done()
        served.set()
        assert slow.future.result(timeout=60).status is None
    assert len(hook.received) == 3


def test_all_spellings_of_a_receiver_share_its_limit(redis: Redis):
    deliverer = Deliverer(replace(SETTINGS, webhook_max_in_flight=1), redis)
    assert deliverer._limiter.acquire("alice", "hooks.example.com:443") == 0.0
    for number, host in enumerate(
        ["hooks.example.com", "Hooks.Example.com.", "hooks.example.com:443", "hooks。example.com"]
    ):
        again = run_attempt(deliverer, delivery(redis, f"https://{host}/", job_id=str(number) * 32))
        assert isinstance(again, RetryLater)
        assert again["postponed_s"] >= 1
    assert len(deliverer._limiter._receivers) == 1
    deliverer.close()


def test_a_postponed_delivery_is_not_an_attempt_and_fails_after_days(redis: Redis, hook: Receiver):
    deliverer = Deliverer(replace(SETTINGS, webhook_max_in_flight=1), redis)
    job = delivery(redis, hook.url)
    assert deliverer._limiter.acquire("alice", f"127.0.0.1:{hook.port}") == 0.0
    again = run_attempt(deliverer, job)
    assert isinstance(again, RetryLater)
    assert again["postponed_s"] >= 1
    assert DeliveryRecord.from_job(job).num_attempts == 0
    assert hook.received == []

    redis.hset(job.key, "since", time.time() - MAX_DELIVERY_AGE_S - 1)
    job.refresh()
    with pytest.raises(Undeliverable, match="not answered for days"):
        run_attempt(deliverer, job)
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
        run_attempt(deliverer, job)
    assert hook.received == []
