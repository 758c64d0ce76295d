"""Deliveries to registered endpoints: subscriptions, secrets of their own, disabled and deleted endpoints."""

import base64
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from redis import Redis
from standardwebhooks import Webhook

from scorepool import store, wire
from scorepool.worker.rq.in_flight import AsyncResult
from scorepool.worker.webhooks.webhook_worker import Deliverer, Undeliverable
from tests.worker.receiver import Receiver
from tests.worker.webhooks.conftest import (
    ALICE_SECRET,
    ENDPOINT_SECRET,
    JOB_ID,
    OPERATOR_SECRET,
    SETTINGS,
    delivery,
    fetch_delivery,
    report_end,
    run_attempt,
    subscribe,
)


def test_an_event_goes_to_the_webhook_of_the_job_and_to_every_endpoint_that_subscribes_to_it(
    redis: Redis, deliverer: Deliverer, hook: Receiver
):
    subscriber = subscribe(redis, hook.url)
    for number, changes in enumerate([{"events": ["job.failed"]}, {"disabled_at": 1.0}]):
        other = replace(subscriber.endpoint, id=str(number) * 16, **changes)
        redis.hset(store.Keys.endpoints_of("alice"), other.id, wire.encode_json(replace(subscriber, endpoint=other)))
    subscribe(redis, hook.url, owner="bob")
    run_attempt(deliverer, delivery(redis, hook.url))
    run_attempt(deliverer, fetch_delivery(redis, f"wh_{JOB_ID}_{'e' * 16}"))

    own, endpoint = hook.received
    assert own.body == endpoint.body
    Webhook(ALICE_SECRET).verify(own.body, dict(own.headers))
    Webhook(ENDPOINT_SECRET).verify(endpoint.body, dict(endpoint.headers))
    assert own.headers["webhook-id"] != endpoint.headers["webhook-id"]
    assert redis.llen("rq:queue:webhooks") == 2
    assert redis.zcard(store.Keys.deliveries_of("alice")) == 2


@pytest.mark.parametrize(
    ("changes", "num_deliveries"), [({}, 1), ({"events": ["job.failed"]}, 0), ({"disabled_at": 1.0}, 0)]
)
def test_the_outbox_reads_a_subscriber_as_it_is_encoded(redis: Redis, changes: dict[str, Any], num_deliveries: int):
    subscriber = subscribe(redis, "https://hooks.example/")
    changed = replace(subscriber, endpoint=replace(subscriber.endpoint, **changes))
    redis.hset(store.Keys.endpoints_of("alice"), subscriber.endpoint.id, wire.encode_json(changed))
    report_end(redis, JOB_ID)
    assert redis.llen("rq:queue:webhooks") == num_deliveries


@pytest.mark.parametrize(
    "text", ["[", "7", "{}", '{"endpoint": 5}', '{"endpoint": {"id": [], "events": ["job.finished"]}}']
)
def test_an_endpoint_that_cannot_be_decoded_does_not_keep_a_job_from_ending(redis: Redis, hook: Receiver, text: str):
    redis.hset(store.Keys.endpoints_of("alice"), "x", text)
    subscribe(redis, hook.url)
    report_end(redis, JOB_ID)
    assert redis.lrange("rq:queue:webhooks", 0, -1) == [f"wh_{JOB_ID}_{'e' * 16}".encode()]


def test_a_rotated_secret_signs_until_it_expires(redis: Redis, hook: Receiver):
    subscriber = subscribe(redis, hook.url)
    new = "whsec_" + base64.b64encode(b"n" * 32).decode()
    for expires_at, signs in [(time.time() + 60, True), (time.time() - 60, False)]:
        old = wire.SigningSecret(secret=ENDPOINT_SECRET, expires_at=expires_at)
        rotated = replace(subscriber, secrets=[wire.SigningSecret(secret=new), old])
        redis.hset(store.Keys.endpoints_of("alice"), subscriber.endpoint.id, wire.encode_json(rotated))
        report_end(redis, JOB_ID)
        deliverer = Deliverer(SETTINGS, redis)
        [*_, id_] = redis.lrange("rq:queue:webhooks", 0, -1)
        run_attempt(deliverer, fetch_delivery(redis, id_.decode()))
        deliverer.close()
        received = hook.received[-1]
        Webhook(new).verify(received.body, dict(received.headers))
        assert len(received.headers["webhook-signature"].split()) == 1 + signs
        if signs:
            Webhook(ENDPOINT_SECRET).verify(received.body, dict(received.headers))


def test_http_410_of_an_old_url_leaves_the_endpoint_that_was_moved_meanwhile(redis: Redis, hook: Receiver):
    hook.answers = [(410, {})]
    subscriber = subscribe(redis, hook.url)
    key = store.Keys.endpoints_of("alice")
    deliverer = Deliverer(SETTINGS, redis)
    report_end(redis, JOB_ID)
    pending = deliverer(fetch_delivery(redis, f"wh_{JOB_ID}_{'e' * 16}"))
    moved = replace(subscriber, endpoint=replace(subscriber.endpoint, url="https://new.example/"))
    redis.hset(key, subscriber.endpoint.id, wire.encode_json(moved))
    assert isinstance(pending, AsyncResult)
    assert pending.future.result(timeout=60).status == 410
    deliverer.close()

    assert wire.parse(redis.hget(key, subscriber.endpoint.id), wire.Subscriber) == moved


def test_http_410_disables_the_endpoint_until_its_owner_enables_it(redis: Redis, hook: Receiver):
    hook.answers = [(410, {})]
    subscriber = subscribe(redis, hook.url)
    deliverer = Deliverer(SETTINGS, redis)
    report_end(redis, JOB_ID)
    job = fetch_delivery(redis, f"wh_{JOB_ID}_{'e' * 16}")
    with pytest.raises(Undeliverable, match="HTTP 410"):
        run_attempt(deliverer, job)
    deliverer.close()

    stored = wire.parse(redis.hget(store.Keys.endpoints_of("alice"), subscriber.endpoint.id), wire.Subscriber)
    assert stored.endpoint.disabled_at == pytest.approx(time.time(), abs=60)
    assert "410" in str(stored.endpoint.disabled_reason)
    assert stored.secrets == subscriber.secrets
    report_end(redis, "f" * 32)
    assert redis.llen("rq:queue:webhooks") == 1  # no event reaches it from now on

    deliverer = Deliverer(SETTINGS, redis)
    with pytest.raises(Undeliverable, match="disabled: the receiver answered HTTP 410"):
        run_attempt(deliverer, job)
    redis.hset(store.Keys.endpoints_of("alice"), subscriber.endpoint.id, wire.encode_json(stored.as_enabled()))
    deliverer.close()
    deliverer = Deliverer(SETTINGS, redis)
    hook.answers = [(204, {})]
    run_attempt(deliverer, job)
    deliverer.close()
    assert len(hook.received) == 2


def test_a_delivery_to_an_endpoint_that_was_deleted_fails(redis: Redis, deliverer: Deliverer, hook: Receiver):
    subscriber = subscribe(redis, hook.url)
    report_end(redis, JOB_ID)
    redis.hdel(store.Keys.endpoints_of("alice"), subscriber.endpoint.id)
    with pytest.raises(Undeliverable, match="its endpoint was deleted"):
        run_attempt(deliverer, fetch_delivery(redis, f"wh_{JOB_ID}_{'e' * 16}"))
    assert hook.received == []


def test_the_operator_prints_the_secret_of_a_name(redis: Redis, redis_url: str):
    rotation = wire.SecretRotation(salt="s", previous_salt="", previous_expires_at=time.time() + 60)
    redis.set(store.Keys.webhook_secret("alice"), wire.encode_json(rotation))
    command = [str(Path(sys.executable).with_name("scorepool")), "webhook-secret"]
    environ = os.environ | {"SCOREPOOL_REDIS_URL": redis_url, "SCOREPOOL_WEBHOOK_SECRET": OPERATOR_SECRET}
    done = subprocess.run([*command, "alice"], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == store.webhook_secrets(OPERATOR_SECRET, "alice", rotation, time.time())[:1]
    environ["SCOREPOOL_WEBHOOK_SECRET"] = ""
    refused = subprocess.run([*command, "alice"], env=environ, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "SCOREPOOL_WEBHOOK_SECRET is not set" in refused.stderr
