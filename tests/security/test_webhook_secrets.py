"""A tenant's receiver accepts the events of its own jobs only, whoever sends to its URL and whatever they know."""

import base64
import hmac

import httpx
import pytest
from msgspec.structs import replace
from redis import Redis
from standardwebhooks import Webhook, WebhookVerificationError

from scorepool import store, wire
from scorepool.worker.webhooks.webhook_worker import Deliverer
from tests.api.conftest import ALICE, BOB, KEYS, SECRET, Serving, bearer, score
from tests.api.fake_worker import FakeWorker
from tests.worker.receiver import Received, receiver
from tests.worker.webhooks.conftest import fetch_delivery, run_attempt

pytestmark = pytest.mark.anyio
SETTINGS = store.Settings(webhook_secret=SECRET, webhook_allow_private=True)


async def shown_secret(http: httpx.AsyncClient, key: str, method: str = "GET") -> str:
    reply = await http.request(method, "/v1/webhooks/secret", headers=bearer(key))
    assert reply.status_code == 200, reply.text
    return str(reply.json()["secret"])


async def send_event(http: httpx.AsyncClient, worker: FakeWorker, key: str, url: str) -> str:
    """Run a job of the key with this webhook; return the id of the delivery."""
    reply = await http.post("/v1/jobs", json=score(webhook=url), headers=bearer(key))
    assert reply.status_code == 202, reply.text
    worker.end(reply.json()["id"])
    return store.Keys.delivery(reply.json()["id"])


def deliver(redis: Redis, *delivery_ids: str) -> None:
    deliverer = Deliverer(SETTINGS, redis)
    for delivery_id in delivery_ids:
        run_attempt(deliverer, fetch_delivery(redis, delivery_id))
    deliverer.close()


def accepts(secret: str, received: Received) -> bool:
    try:
        Webhook(secret).verify(received.body, dict(received.headers))
    except WebhookVerificationError:
        return False
    return True


async def test_an_event_that_another_tenant_sends_to_a_receiver_is_not_verified_there(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    async with serving(api_keys=KEYS, webhook_allow_private=True) as http:
        secrets = {key: await shown_secret(http, key) for key in (ALICE, BOB)}
        with receiver() as bobs:
            deliver(redis, *[await send_event(http, worker, key, bobs.url) for key in (ALICE, BOB)])
    from_alice, from_bob = bobs.received
    assert [accepts(secrets[BOB], each) for each in (from_alice, from_bob)] == [False, True]
    assert [accepts(secrets[ALICE], each) for each in (from_alice, from_bob)] == [True, False]
    assert not any(accepts(SECRET, each) for each in bobs.received)


async def test_no_reply_shows_the_operators_secret_and_no_secret_shows_another(serving: Serving):
    async with serving(api_keys=KEYS) as http:
        secrets = [await shown_secret(http, key, method) for key in (ALICE, BOB) for method in ("GET", "POST", "GET")]
    assert SECRET not in secrets
    assert len(set(secrets)) == 4
    key = base64.b64decode(secrets[0].removeprefix("whsec_"))  # what Alice knows does not derive Bob's
    derived = hmac.digest(key, b"scorepool: webhook secret of a name\0bob\0", "sha256")
    assert base64.b64encode(derived).decode() not in secrets[3]


async def test_an_event_that_was_queued_before_a_rotation_is_signed_with_both_secrets_for_a_day(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    async with serving(api_keys=KEYS, webhook_allow_private=True) as http:
        with receiver() as hook:
            old = await shown_secret(http, ALICE)
            queued = [await send_event(http, worker, ALICE, hook.url) for _ in range(2)]
            new = await shown_secret(http, ALICE, "POST")
            deliver(redis, queued[0])
            key = store.Keys.webhook_secret("alice")
            rotation = wire.parse(redis.get(key), wire.SecretRotation)
            now = redis.time()[0]
            assert 86_400 - 60 < rotation.previous_expires_at - now <= 86_400 + 1
            redis.set(key, wire.encode_json(replace(rotation, previous_expires_at=now - 1.0)))
            deliver(redis, queued[1])
            assert (await http.get("/v1/webhooks/secret", headers=bearer(ALICE))).json() == {
                "secret": new,
                "previous_expires_at": None,
            }
    assert [(accepts(old, each), accepts(new, each)) for each in hook.received] == [(True, True), (False, True)]


async def test_a_delivery_whose_rotation_cannot_be_read_is_signed_with_the_first_secret(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    """As if Redis had been emptied, with which the rotations are lost."""
    async with serving(api_keys=KEYS, webhook_allow_private=True) as http:
        with receiver() as hook:
            first = await shown_secret(http, ALICE)
            assert await shown_secret(http, ALICE, "POST") != first
            redis.set(store.Keys.webhook_secret("alice"), b"\x80")
            assert await shown_secret(http, ALICE) == first
            deliver(redis, await send_event(http, worker, ALICE, hook.url))
    assert accepts(first, hook.received[0])


@pytest.mark.parametrize(("settings", "reason"), [({}, "no API keys"), ({"webhook_secret": ""}, "no webhooks")])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_server_without_keys_or_webhooks_shows_no_secret(
    serving: Serving, settings: dict[str, str], reason: str, method: str
):
    async with serving(**settings) as http:
        reply = await http.request(method, "/v1/webhooks/secret")
    assert reply.status_code == 409
    assert reason in reply.json()["error"]["message"]
    assert SECRET not in reply.text
