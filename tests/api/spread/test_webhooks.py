"""Webhooks of both servers' jobs: endpoints and secrets are on each, deliveries are listed together."""

import asyncio
from typing import Any

import httpx
import pytest
from redis import Redis

from scorepool import store
from scorepool.store.webhook_secret import webhook_secrets
from scorepool.worker.webhooks.owner_secrets import OwnerSecrets
from scorepool.worker.webhooks.subscribers import Subscribers
from tests.api.conftest import ALICE, KEYS, SECRET, Serving, bearer, score
from tests.api.fake_worker import FakeWorker
from tests.api.spread.conftest import OtherServer
from tests.api.test_webhooks import URL, deliveries, register

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
        await asyncio.to_thread(Subscribers(other).disable, "local", endpoint_id, "HTTP 410")  # a worker found it gone
        assert (await http.get(path)).json()["disabled_reason"] == "HTTP 410"
        [listed] = (await http.get("/v1/webhooks/endpoints")).json()["endpoints"]
        changed = (await http.patch(path, json={"description": "ops"})).json()
        assert listed["disabled_reason"] == changed["disabled_reason"] == "HTTP 410"
        assert (await http.patch(path, json={"disabled": False})).json()["disabled_at"] is None
        assert (await http.get(path)).json()["disabled_at"] is None
        assert (await http.delete(path)).status_code == 204
        assert secrets() == []


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
