"""Webhooks of both servers' jobs: endpoints and secrets are on each, deliveries are listed together."""

import asyncio
import json
import select
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.client import Pipeline

from scorepool import store, verify_webhook
from scorepool.store import JobField
from scorepool.store.webhook_secret import webhook_secrets
from scorepool.worker.webhooks.owner_secrets import OwnerSecrets
from scorepool.worker.webhooks.subscribers import Subscribers
from tests.api.conftest import ALICE, KEYS, SECRET, Serving, bearer, score
from tests.api.fake_worker import FakeWorker
from tests.api.spread.conftest import OtherServer
from tests.api.test_webhooks import URL, deliveries, register
from tests.worker.conftest import until
from tests.worker.receiver import receiver
from tests.worker.webhooks.conftest import webhook_worker

pytestmark = pytest.mark.anyio


async def end_job(http: httpx.AsyncClient, fake: FakeWorker, **changes: Any) -> str:
    job_id = (await http.post("/v1/jobs", json=score(model=fake.model, **changes))).json()["id"]
    fake.end(job_id)
    return str(job_id)


async def test_an_endpoint_gets_the_events_of_jobs_of_both_servers(
    spread: Serving, worker: FakeWorker, big: FakeWorker, redis: Redis, other: Redis
):
    async with spread() as http:
        endpoint = (await register(http))["endpoint"]
        own = {"webhook": "https://hooks.example/own"}
        ids = [await end_job(http, fake, **more) for fake in (worker, big) for more in ({}, own)]
        found = await deliveries(http)
        assert {one["job_id"] for one in found} == set(ids)
        assert len(found) == 6  # each job's for the endpoint, two for the jobs' own
        first = (await http.get("/v1/webhooks/deliveries?limit=2")).json()
        pages = first["deliveries"]
        while first["next_cursor"]:
            query = f"?limit=2&cursor={first['next_cursor']}"
            first = (await http.get(f"/v1/webhooks/deliveries{query}")).json()
            pages += first["deliveries"]
        assert sorted(one["id"] for one in pages) == sorted(one["id"] for one in found)
        assert len(await deliveries(http, f"?endpoint_id={endpoint['id']}")) == 4
        of_big = next(one for one in found if one["job_id"] == ids[2])
        assert (await http.get(f"/v1/webhooks/deliveries/{of_big['id']}")).json()["job_id"] == ids[2]
        big.fail_delivery(of_big["id"])
        worker.fail_delivery(next(one["id"] for one in found if one["job_id"] == ids[0]))
        assert (await http.post(f"/v1/webhooks/deliveries/{of_big['id']}/replay")).status_code == 202
        big.fail_delivery(of_big["id"])
        replayed = await http.post("/v1/webhooks/deliveries/replay", json={"since": 0})
        assert replayed.json()["replayed"] == 2


async def test_endpoints_change_on_both_servers(
    spread: Serving, worker: FakeWorker, big: FakeWorker, redis: Redis, other: Redis
):
    async with spread() as http:
        registered = await register(http)
        endpoint_id = registered["endpoint"]["id"]
        path = f"/v1/webhooks/endpoints/{endpoint_id}"

        def secrets() -> list[list[str]]:
            found = [Subscribers(server).get("local", endpoint_id) for server in (redis, other)]
            return [[one.secret for one in each.secrets] for each in found if each]

        assert secrets() == [[registered["secret"]]] * 2
        rotated = (await http.post(f"{path}/secret")).json()["secret"]
        assert secrets() == [[rotated, registered["secret"]]] * 2
        url = registered["endpoint"]["url"]
        await asyncio.to_thread(
            Subscribers(other).disable, "local", endpoint_id, url, "HTTP 410"
        )  # a worker found it gone
        assert (await http.get(path)).json()["disabled_reason"] == "HTTP 410"
        [listed] = (await http.get("/v1/webhooks/endpoints")).json()["endpoints"]
        changed = (await http.patch(path, json={"description": "ops"})).json()
        assert listed["disabled_reason"] == changed["disabled_reason"] == "HTTP 410"
        assert (await http.patch(path, json={"disabled": False})).json()["disabled_at"] is None
        assert (await http.get(path)).json()["disabled_at"] is None
        assert (await http.delete(path)).status_code == 204
        assert secrets() == []


async def test_an_endpoint_that_is_deleted_while_it_is_changed_is_on_no_server(
    spread: Serving, redis: Redis, other: Redis, monkeypatch: pytest.MonkeyPatch
):
    async with spread() as http:
        path = f"/v1/webhooks/endpoints/{(await register(http))['endpoint']['id']}"
        write = AsyncRedis.hset

        async def write_late(client: AsyncRedis, *args: Any) -> int:
            assert (await http.delete(path)).status_code == 204
            return await write(client, *args)

        monkeypatch.setattr(AsyncRedis, "hset", write_late)
        monkeypatch.setattr(Pipeline, "hset", write, raising=False)

        assert (await http.patch(path, json={"description": "ops"})).status_code == 404
        assert [server.hlen(store.Keys.endpoints_of("local")) for server in (redis, other)] == [0, 0]


async def test_an_endpoint_that_one_server_cannot_take_is_on_none(
    spread: Serving, redis: Redis, other: Redis, other_server: OtherServer
):
    async with spread() as http:
        other_server.kill()
        try:
            assert (await http.post("/v1/webhooks/endpoints", json={"url": URL})).status_code == 503
        finally:
            other_server.start()
        assert redis.hlen(store.Keys.endpoints_of("local")) == 0


async def test_an_endpoint_that_cannot_be_deleted_on_one_server_stays_on_all(
    spread: Serving, redis: Redis, other: Redis, other_server: OtherServer
):
    async with spread() as http:
        path = f"/v1/webhooks/endpoints/{(await register(http))['endpoint']['id']}"
        other_server.kill()
        try:
            assert (await http.delete(path)).status_code == 503
        finally:
            other_server.start()
        assert [server.hlen(store.Keys.endpoints_of("local")) for server in (redis, other)] == [1, 1]
        assert (await http.delete(path)).status_code == 204
        assert [server.hlen(store.Keys.endpoints_of("local")) for server in (redis, other)] == [0, 0]


async def test_rotated_secrets_sign_on_both_servers_and_new_servers_get_them(
    serving: Serving, urls: str, redis: Redis, other: Redis
):
    async with serving(api_keys=KEYS) as http:  # with one server
        endpoint = (await http.post("/v1/webhooks/endpoints", json={"url": URL}, headers=bearer(ALICE))).json()
        first = (await http.post("/v1/webhooks/secret", headers=bearer(ALICE))).json()["secret"]
    async with serving(api_keys=KEYS, redis_urls=urls) as http:
        copies = http._transport.app.state.scorepool.copies  # type: ignore[attr-defined]
        await copies.complete()
        assert Subscribers(other).get("alice", endpoint["endpoint"]["id"]) is not None
        assert OwnerSecrets(other, SECRET).get("alice")[0] == first
        second = (await http.post("/v1/webhooks/secret", headers=bearer(ALICE))).json()["secret"]
        assert [OwnerSecrets(server, SECRET).get("alice")[:2] for server in (redis, other)] == [[second, first]] * 2
    assert first not in webhook_secrets(SECRET, "bob", None, 0.0)


async def test_a_secret_that_one_server_cannot_take_is_not_rotated(
    spread: Serving, redis: Redis, other: Redis, other_server: OtherServer
):
    """Else the secret that the owner knows would be the one before the previous, which signs no longer."""
    headers = bearer(ALICE)
    async with spread(api_keys=KEYS) as http:
        first = (await http.post("/v1/webhooks/secret", headers=headers)).json()["secret"]
        other_server.kill()
        try:
            assert (await http.post("/v1/webhooks/secret", headers=headers)).status_code == 503
        finally:
            other_server.start()
        second = (await http.post("/v1/webhooks/secret", headers=headers)).json()["secret"]
        assert [OwnerSecrets(server, SECRET).get("alice")[:2] for server in (redis, other)] == [[second, first]] * 2


async def test_a_server_that_missed_a_rotation_gets_it(spread: Serving, redis: Redis, other: Redis):
    async with spread(api_keys=KEYS) as http:
        await http.post("/v1/webhooks/secret", headers=bearer(ALICE))
        old = other.get(store.Keys.webhook_secret("alice"))
        secret = (await http.post("/v1/webhooks/secret", headers=bearer(ALICE))).json()["secret"]
        other.set(store.Keys.webhook_secret("alice"), old or b"")  # it died before it took the second
        await http._transport.app.state.scorepool.copies.complete()  # type: ignore[attr-defined]
        assert OwnerSecrets(other, SECRET).get("alice")[0] == secret


async def test_a_webhook_of_a_job_on_the_other_server_is_signed_and_retried_through_outages_and_kill_9(
    spread: Serving, redis_url: str, other: Redis, other_server: OtherServer, urls: str, big: FakeWorker, root: Path
):
    """The receiver is down for the first attempt, the worker dies within the second, the third arrives."""
    key = store.RqKeys.registry("scheduled", store.WEBHOOKS)

    def retry_now() -> None:
        for delivery_id in other.zrange(key, 0, -1):
            other.zadd(key, {delivery_id: 0}, xx=True)

    def wait(condition: Callable[[], object]) -> None:
        until(lambda: retry_now() or condition())

    with closing(socket.create_server(("127.0.0.1", 0))) as unused:
        port = unused.getsockname()[1]
    url = f"http://127.0.0.1:{port}/hook"
    environ = {"SCOREPOOL_REDIS_URL": redis_url, "SCOREPOOL_REDIS_URLS": urls, "SCOREPOOL_WEBHOOK_SECRET": SECRET}
    async with spread(webhook_allow_private=True) as http:
        job_id = await end_job(http, big, webhook=url)
        delivery_id = store.Keys.delivery(job_id)

        def num_attempts() -> int:
            return len(json.loads(other.hget(f"rq:job:{delivery_id}", JobField.ATTEMPTS) or "[]"))

        with webhook_worker(other_server.url, root, **environ) as process:
            await asyncio.to_thread(until, num_attempts)
            with closing(socket.create_server(("127.0.0.1", port))) as silent:  # it takes the request and says nothing
                silent.settimeout(60)
                await asyncio.to_thread(wait, lambda: select.select([silent], [], [], 0)[0])
                process.kill()
                await asyncio.to_thread(process.wait)
        found = (await http.get(f"/v1/webhooks/deliveries/{delivery_id}")).json()
        assert (found["state"], found["job_id"]) == ("pending", job_id)
        assert found["attempts"][0]["status"] is None
        with receiver(port=port) as hook, webhook_worker(other_server.url, root, **environ):
            await asyncio.to_thread(wait, lambda: hook.received)
            await asyncio.to_thread(wait, lambda: other.hget(f"rq:job:{delivery_id}", "status") == b"finished")
        assert (await http.get(f"/v1/webhooks/deliveries/{delivery_id}")).json()["state"] == "delivered"
    [received] = hook.received
    headers = {name.lower(): value for name, value in received.headers.items()}
    verify_webhook(received.body, headers, webhook_secrets(SECRET, "local", None, 0.0))
    assert headers["webhook-id"] == delivery_id
    assert json.loads(received.body)["data"]["id"] == job_id
