"""Webhook endpoints and deliveries over HTTP."""

import asyncio
import time
from typing import Any

import httpx
import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from rq.job import JobStatus

from scorepool import store, wire
from scorepool.api.repositories.webhook_deliveries import MAX_ASKED_FOR, WebhookDeliveries
from scorepool.api.repositories.webhook_endpoints import MAX_ENDPOINTS
from tests.api.conftest import ALICE, BOB, KEYS, Serving, bearer, eventually, score
from tests.api.fake_worker import COMPLETED, RESULT, FakeWorker

pytestmark = pytest.mark.anyio
URL = "https://hooks.example/in?token=hush"


async def register(http: httpx.AsyncClient, **changes: Any) -> dict[str, Any]:
    reply = await http.post("/v1/webhooks/endpoints", json={"url": URL} | changes)
    assert reply.status_code == 201, reply.text
    return reply.json()


async def end_jobs(http: httpx.AsyncClient, worker: FakeWorker, count: int, **changes: Any) -> list[str]:
    ids = [(await http.post("/v1/jobs", json=score(**changes))).json()["id"] for _ in range(count)]
    for job_id in ids:
        worker.end(job_id)
    return ids


async def deliveries(http: httpx.AsyncClient, query: str = "") -> list[dict[str, Any]]:
    reply = await http.get(f"/v1/webhooks/deliveries{query}")
    assert reply.status_code == 200, reply.text
    return reply.json()["deliveries"]


async def test_the_secret_of_an_endpoint_is_shown_only_at_registration_and_rotation(serving: Serving):
    async with serving() as http:
        registered = await register(http, events=["job.failed"], description="ops")
        endpoint_id = registered["endpoint"]["id"]
        read = await http.get(f"/v1/webhooks/endpoints/{endpoint_id}")
        listed = await http.get("/v1/webhooks/endpoints")
        rotated = (await http.post(f"/v1/webhooks/endpoints/{endpoint_id}/secret")).json()

    assert registered["secret"].startswith("whsec_")
    assert read.json() == registered["endpoint"] == listed.json()["endpoints"][0]
    assert (read.json()["url"], read.json()["events"], read.json()["disabled_at"]) == (URL, ["job.failed"], None)
    assert "whsec_" not in read.text + listed.text
    assert rotated["secret"] != registered["secret"]
    assert rotated["previous_expires_at"] == pytest.approx(time.time() + 86_400, abs=60)


async def test_the_previous_secret_is_valid_for_a_day_after_rotation(serving: Serving, redis: Redis):
    async with serving() as http:
        registered = await register(http)
        endpoint_id = registered["endpoint"]["id"]
        secrets = [registered["secret"]]
        secrets += [
            (await http.post(f"/v1/webhooks/endpoints/{endpoint_id}/secret")).json()["secret"] for _ in range(2)
        ]
    subscriber = wire.parse(redis.hget(store.Keys.endpoints_of("local"), endpoint_id), wire.Subscriber)

    assert subscriber.valid_secrets(time.time()) == [secrets[2], secrets[1]]
    assert subscriber.valid_secrets(time.time() + 90_000) == [secrets[2]]


async def test_a_rotation_whose_reply_was_lost_is_one_rotation(
    serving: Serving, redis: Redis, monkeypatch: pytest.MonkeyPatch
):
    """redis-py runs a transaction again if the connection breaks while the reply to EXEC is under way."""
    transaction = AsyncRedis.transaction

    async def lose_reply(self: AsyncRedis, write: Any, *keys: Any, **options: Any) -> Any:
        await transaction(self, write, *keys, **options)
        return await transaction(self, write, *keys, **options)

    async with serving(api_keys=KEYS) as http:
        http.headers.update(bearer(ALICE))
        registered = await register(http)
        endpoint_id = registered["endpoint"]["id"]
        before = (await http.get("/v1/webhooks/secret")).json()
        monkeypatch.setattr(AsyncRedis, "transaction", lose_reply)
        rotated = (await http.post(f"/v1/webhooks/endpoints/{endpoint_id}/secret")).json()
        after = (await http.post("/v1/webhooks/secret")).json()
    subscriber = wire.parse(redis.hget(store.Keys.endpoints_of("alice"), endpoint_id), wire.Subscriber)
    rotation = wire.parse(redis.get(store.Keys.webhook_secret("alice")), wire.SecretRotation)

    assert subscriber.valid_secrets(time.time()) == [rotated["secret"], registered["secret"]]
    assert after["secret"] != before["secret"]
    assert rotation.previous_salt == ""  # that of the secret before


async def test_an_endpoint_is_changed_disabled_enabled_and_deleted(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        endpoint_id = (await register(http))["endpoint"]["id"]
        path = f"/v1/webhooks/endpoints/{endpoint_id}"
        moved = (await http.patch(path, json={"url": "https://new.example/", "events": ["job.failed"]})).json()
        await end_jobs(http, worker, 1)
        assert redis.llen("rq:queue:webhooks") == 0
        await http.patch(path, json={"events": ["job.finished"]})
        disabled = (await http.patch(path, json={"disabled": True})).json()
        again = (await http.patch(path, json={"disabled": True})).json()
        await end_jobs(http, worker, 1)
        assert redis.llen("rq:queue:webhooks") == 0
        enabled = (await http.patch(path, json={"disabled": False})).json()
        await end_jobs(http, worker, 1)
        assert redis.llen("rq:queue:webhooks") == 1
        assert (await http.delete(path)).status_code == 204
        assert [(await http.request(method, path)).status_code for method in ("GET", "DELETE")] == [404, 404]
        await end_jobs(http, worker, 1)
        assert redis.llen("rq:queue:webhooks") == 1

    assert (moved["url"], moved["events"]) == ("https://new.example/", ["job.failed"])
    assert "its owner" in disabled["disabled_reason"]
    assert again == disabled
    assert (enabled["disabled_at"], enabled["disabled_reason"]) == (None, None)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "url"),
        ({"url": "http://hooks.example/"}, "url"),
        ({"url": "https://127.1/"}, "url"),
        ({"url": "https://user:pass@hooks.example/"}, "url"),
        ({"url": URL, "events": []}, "events"),
        ({"url": URL, "events": ["job.unknown"]}, "events[0]"),
        ({"url": URL, "secret": "mine"}, "secret"),
    ],
)
async def test_a_bad_registration_is_refused_and_names_its_field(serving: Serving, body: Any, field: str, redis: Redis):
    async with serving() as http:
        reply = await http.post("/v1/webhooks/endpoints", json=body)
        good = (await register(http))["endpoint"]["id"]
        changed = await http.patch(f"/v1/webhooks/endpoints/{good}", json=body) if body else reply
    assert (reply.status_code, reply.json()["error"]["field"]) == (400, field)
    assert (changed.status_code, changed.json()["error"]["field"]) == (400, field)


async def test_a_server_without_a_secret_registers_no_endpoint(serving: Serving):
    async with serving(webhook_secret="") as http:
        reply = await http.post("/v1/webhooks/endpoints", json={"url": URL})
    assert reply.status_code == 400
    assert "SCOREPOOL_WEBHOOK_SECRET" in reply.json()["error"]["message"]


async def test_an_owner_has_at_most_max_endpoints(serving: Serving):
    async with serving() as http:
        for _ in range(MAX_ENDPOINTS):
            await register(http)
        reply = await http.post("/v1/webhooks/endpoints", json={"url": URL})
    assert reply.status_code == 409


SYNCHRONOUS: list[tuple[str, dict[str, Any], wire.Result]] = [
    ("/v1/completions", {"model": "demo", "prompt": "a"}, COMPLETED),
    ("/v1/completions", {"model": "demo", "prompt": "a", "stream": True}, COMPLETED),
    ("/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "a"}]}, COMPLETED),
    ("/tokenize", {"model": "demo", "prompt": "a"}, RESULT),
    ("/generate", {"text": "a"}, COMPLETED),
    ("/v1/score", {"model": "demo", "query": [1], "items": [[1]], "label_token_ids": [2]}, RESULT),
    ("/get_sequence_logprobs/", {"sequences": [[1, 2]], "prompt_lengths": [0]}, RESULT),
]


@pytest.mark.parametrize("end", ["finished", "canceled"])
@pytest.mark.parametrize(("route", "body", "result"), SYNCHRONOUS)
async def test_a_synchronous_request_sends_no_event_to_registered_endpoints(
    serving: Serving, worker: FakeWorker, route: str, body: dict[str, Any], result: wire.Result, end: str
):
    """The client has the answer, and the result that an event would link to expires after a minute."""
    async with serving() as http:
        await register(http)
        calling = asyncio.create_task(http.post(route, json=body))
        await eventually(worker.waiting)
        [job_id] = worker.waiting()
        if end == "finished":
            worker.end(job_id, result)
        else:
            worker.cancel(job_id)
        reply = await calling
        assert reply.is_success == (end == "finished")
        assert await deliveries(http) == []


async def test_a_native_job_whose_client_waits_for_it_sends_an_event(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        endpoint_id = (await register(http))["endpoint"]["id"]
        calling = asyncio.create_task(http.post("/v1/jobs", json=score(), headers={"Prefer": "wait=60"}))
        await eventually(worker.waiting)
        [job_id] = worker.waiting()
        worker.end(job_id)
        assert (await calling).json()["status"] == "finished"
        [delivery] = await deliveries(http)

    assert (delivery["job_id"], delivery["event"], delivery["endpoint_id"]) == (job_id, "job.finished", endpoint_id)


async def test_deliveries_are_listed_newest_first_in_pages_and_by_state(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        endpoint_id = (await register(http))["endpoint"]["id"]
        ids = await end_jobs(http, worker, 5, webhook=URL)
        everything = await deliveries(http)
        worker.fail_delivery(store.Keys.delivery(ids[1]))
        failed = await deliveries(http, "?state=failed")
        pending = await deliveries(http, "?state=pending&limit=200")
        to_endpoint = await deliveries(http, f"?endpoint_id={endpoint_id}")
        paged, cursor = [], ""
        while cursor is not None:
            page = (await http.get(f"/v1/webhooks/deliveries?limit=3{cursor and '&cursor=' + cursor}")).json()
            paged += page["deliveries"]
            cursor = page["next_cursor"]

    assert len(everything) == 10
    assert [one["id"] for one in paged] == [one["id"] for one in everything]
    assert [one["job_id"] for one in everything[::2]] == list(reversed(ids))
    assert {one["url"] for one in everything} == {"https://hooks.example/in", None}
    assert [(one["job_id"], one["state"], one["reason"]) for one in failed] == [(ids[1], "failed", "HTTP 410")]
    assert len(pending) == 9
    assert len(to_endpoint) == 5


async def test_a_delivery_shows_its_attempts_and_the_time_of_the_next(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    async with serving() as http:
        [job_id] = await end_jobs(http, worker, 1, webhook=URL)
        delivery_id = store.Keys.delivery(job_id)
        attempts = [wire.DeliveryAttempt(at=float(number), elapsed_ms=5, status=500) for number in range(3)]
        redis.hset(f"rq:job:{delivery_id}", mapping={"status": "scheduled", "attempts": wire.encode_json(attempts)})
        redis.zadd("rq:scheduled:webhooks", {delivery_id: 1234.0})
        read = (await http.get(f"/v1/webhooks/deliveries/{delivery_id}")).json()
        [listed] = await deliveries(http)

    assert (read["id"], read["state"], read["event"], read["job_id"]) == (
        delivery_id,
        "pending",
        "job.finished",
        job_id,
    )
    assert [attempt["at"] for attempt in read["attempts"]] == [0.0, 1.0, 2.0]
    assert [attempt["at"] for attempt in listed["attempts"]] == [2.0]
    assert read["next_attempt_at"] == 1234.0


async def test_a_delivery_can_be_read_and_replayed_after_its_job_expired(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    async with serving() as http:
        [job_id] = await end_jobs(http, worker, 1, webhook=URL)
        redis.delete(f"rq:job:{job_id}", store.Keys.outcome(job_id))
        delivery_id = store.Keys.delivery(job_id)
        pending = await http.post(f"/v1/webhooks/deliveries/{delivery_id}/replay")
        worker.fail_delivery(delivery_id)
        redis.expire(f"rq:job:{delivery_id}", 100)
        replayed = await http.post(f"/v1/webhooks/deliveries/{delivery_id}/replay")

    assert pending.status_code == 409
    assert (replayed.status_code, replayed.json()["state"], replayed.json()["reason"]) == (202, "pending", None)
    assert redis.lrange("rq:queue:webhooks", 0, -1) == [delivery_id.encode()]
    assert redis.zcard("rq:failed:webhooks") == 0
    assert redis.ttl(f"rq:job:{delivery_id}") == -1
    assert worker.job(delivery_id).get_status() == JobStatus.QUEUED


async def test_only_deliveries_that_failed_since_a_time_are_replayed(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    async with serving() as http:
        ids = [store.Keys.delivery(job_id) for job_id in await end_jobs(http, worker, 230, webhook=URL)]
        for delivery_id in ids[:-2]:
            worker.fail_delivery(delivery_id)
        for delivery_id in ids[:5]:  # older ones
            redis.zadd(store.Keys.deliveries_of("local"), {delivery_id: 1000.0})
        redis.delete("rq:queue:webhooks", "rq:deferred:webhooks")
        since = {"since": time.time() - 600}
        elsewhere = await http.post("/v1/webhooks/deliveries/replay", json=since | {"endpoint_id": "other"})
        replayed = await http.post("/v1/webhooks/deliveries/replay", json=since)
        again = await http.post("/v1/webhooks/deliveries/replay", json=since)

    assert (elsewhere.json(), replayed.json(), again.json()) == ({"replayed": 0}, {"replayed": 223}, {"replayed": 0})
    queued = redis.lrange("rq:queue:webhooks", 0, -1) + redis.zrange("rq:deferred:webhooks", 0, -1)
    assert {delivery_id.decode() for delivery_id in queued} == set(ids[5:-2])


async def test_a_test_event_is_a_delivery(serving: Serving, redis: Redis):
    async with serving() as http:
        endpoint_id = (await register(http))["endpoint"]["id"]
        sent = await http.post("/v1/webhooks/test", json={"endpoint_id": endpoint_id})
        listed = await deliveries(http)
        absent = await http.post("/v1/webhooks/test", json={"endpoint_id": "none"})
        await http.patch(f"/v1/webhooks/endpoints/{endpoint_id}", json={"disabled": True})
        disabled = await http.post("/v1/webhooks/test", json={"endpoint_id": endpoint_id})

    assert (sent.status_code, absent.status_code, disabled.status_code) == (202, 404, 409)
    assert (sent.json()["event"], sent.json()["job_id"]) == ("webhook.test", None)
    assert sent.headers["location"] == f"/v1/webhooks/deliveries/{sent.json()['id']}"
    assert listed == [sent.json()]
    assert redis.lrange("rq:queue:webhooks", 0, -1) == [sent.json()["id"].encode()]


async def test_endpoints_and_deliveries_of_other_keys_are_not_found(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving(api_keys=KEYS) as http:
        http.headers = bearer(ALICE)
        endpoint_id = (await register(http))["endpoint"]["id"]
        [job_id] = await end_jobs(http, worker, 1, webhook=URL)
        delivery_id = store.Keys.delivery(job_id)
        worker.fail_delivery(delivery_id)
        http.headers = bearer(BOB)
        statuses = [
            (await http.request(method, f"/v1/webhooks{path}", json=body)).status_code
            for method, path, body in [
                ("GET", f"/endpoints/{endpoint_id}", None),
                ("PATCH", f"/endpoints/{endpoint_id}", {"disabled": True}),
                ("DELETE", f"/endpoints/{endpoint_id}", None),
                ("POST", f"/endpoints/{endpoint_id}/secret", None),
                ("POST", "/test", {"endpoint_id": endpoint_id}),
                ("GET", f"/deliveries/{delivery_id}", None),
                ("POST", f"/deliveries/{delivery_id}/replay", None),
            ]
        ]
        listed = (await http.get("/v1/webhooks/endpoints")).json()["endpoints"], await deliveries(http)
        replayed = (await http.post("/v1/webhooks/deliveries/replay", json={"since": 0})).json()

    assert statuses == [404] * 7
    assert listed == ([], [])
    assert replayed == {"replayed": 0}
    assert redis.zcard("rq:failed:webhooks") == 1


async def test_tests_and_replays_of_one_name_are_limited_in_a_minute_and_those_of_others_go_on(
    serving: Serving, redis: Redis
):
    async with serving(api_keys=KEYS) as http:
        endpoints = {}
        for key in (ALICE, BOB):
            reply = await http.post("/v1/webhooks/endpoints", json={"url": URL}, headers=bearer(key))
            endpoints[key] = {"endpoint_id": reply.json()["endpoint"]["id"]}

        async def test(key: str) -> httpx.Response:
            return await http.post("/v1/webhooks/test", json=endpoints[key], headers=bearer(key))

        statuses = [(await test(ALICE)).status_code for _ in range(MAX_ASKED_FOR + 10)]
        assert statuses == [202] * MAX_ASKED_FOR + [429] * 10
        refused = await test(ALICE)
        assert (refused.json()["error"]["code"], 0 < int(refused.headers["retry-after"]) <= 60) == (
            "too_many_events",
            True,
        )
        replay = await http.post("/v1/webhooks/deliveries/replay", json={"since": 0}, headers=bearer(ALICE))
        assert replay.status_code == 429
        assert (await test(BOB)).status_code == 202
    assert redis.llen("rq:queue:webhooks") == MAX_ASKED_FOR + 1
    assert 0 < redis.ttl(store.Keys.events_asked_for("alice")) <= 60


async def test_replays_at_once_read_one_page_at_a_time(serving: Serving, monkeypatch: pytest.MonkeyPatch):
    most, running = 0, 0

    async def scan(*_: object, **__: object) -> list[tuple[str, str]]:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return []

    async with serving() as http:
        monkeypatch.setattr(WebhookDeliveries, "_scan", scan)
        since = {"since": time.time() - 600}
        replies = [http.post("/v1/webhooks/deliveries/replay", json=since) for _ in range(10)]
        assert [reply.status_code for reply in await asyncio.gather(*replies)] == [202] * 10
    assert most == 1
