"""A model that is given another server: jobs of before are found there, and answered again under their key."""

import json
from typing import Any

import httpx
import pytest
from redis import Redis

from scorepool import store, wire
from tests.api.conftest import Serving, score
from tests.api.fake_worker import FakeWorker
from tests.api.spread.conftest import OtherServer

pytestmark = pytest.mark.anyio
KEY = {"Idempotency-Key": "order-1"}


async def submit(http: httpx.AsyncClient, **changes: Any) -> tuple[int, dict[str, Any]]:
    reply = await http.post("/v1/jobs", json=score(model="big", **changes), headers=KEY)
    return reply.status_code, reply.json()


async def test_a_key_of_before_a_move_is_answered_by_the_server_that_has_the_job(
    serving: Serving, spread: Serving, worker: FakeWorker, big: FakeWorker, redis: Redis
):
    async with serving() as http:
        _, first = await submit(http, wait_for_model=True)
    async with spread() as http:
        status, again = await submit(http, wait_for_model=True)
        assert (status, again["id"], again["is_replay"]) == (202, first["id"], True)
        status, reused = await submit(http, wait_for_model=False)
        assert (status, reused["error"]["field"]) == (409, "Idempotency-Key")
    assert big.waiting() == set()
    assert redis.llen("rq:queue:big") == 1


async def test_a_bulk_of_before_a_move_of_which_jobs_are_gone_is_refused(
    serving: Serving, spread: Serving, big: FakeWorker, redis: Redis
):
    bulk = [score(model="big", wait_for_model=True)] * 2
    async with serving() as http:
        first = (await http.post("/v1/jobs/bulk", json=bulk, headers=KEY)).json()
    async with spread() as http:
        again = (await http.post("/v1/jobs/bulk", json=bulk, headers=KEY)).json()
        assert [job["id"] for job in again] == [job["id"] for job in first]
        redis.delete(store.RqKeys.job(first[1]["id"]))
        assert (await http.post("/v1/jobs/bulk", json=bulk, headers=KEY)).status_code == 409
    assert big.waiting() == set()


async def test_keys_hold_when_servers_change_places(
    serving: Serving, big: FakeWorker, urls: str, other_server: OtherServer, redis_url: str
):
    """A server was the only one, becomes another than home, and is home again."""
    alone, spread = {"redis_url": other_server.url}, {"redis_urls": urls}
    swapped = {"redis_url": other_server.url, "redis_urls": json.dumps({"demo": redis_url})}
    for first, *others in ((alone, spread, swapped), (spread, swapped)):
        big.redis.flushdb()
        big.register(aliases=["large"])
        async with serving(**first) as http:
            _, job = await submit(http)
        for settings in others:
            async with serving(**settings) as http:
                status, again = await submit(http)
                assert (status, again.get("id")) == (202, job["id"])
        assert big.waiting() == {job["id"]}


async def test_a_key_of_an_adapter_is_known_when_its_worker_has_left(spread: Serving, big: FakeWorker, other: Redis):
    """Nothing tells then which server had the adapter."""
    adapter = wire.ServedAdapter(name="ada", fingerprint="e" * 16, path="/a", rank=8)
    big.register(adapters=[adapter])
    async with spread() as http:
        body = score(model="ada", wait_for_model=True)
        first = (await http.post("/v1/jobs", json=body, headers=KEY)).json()
    big.unregister()
    async with spread() as http:
        again = await http.post("/v1/jobs", json=body, headers=KEY)
    assert (again.status_code, again.json()["id"]) == (202, first["id"])


async def test_a_job_on_another_server_than_its_id_names_is_found_while_that_one_is_down(
    serving: Serving, spread: Serving, worker: FakeWorker, big: FakeWorker, other_server: OtherServer, urls: str
):
    """As of one that was there before the model moved, or of one of 65,536 of home's."""
    tag = store.ServerMap.load(store.Settings(redis_urls=urls)).servers[1].tag
    async with serving() as http:
        job_id = (await http.post("/v1/jobs", json=score())).json()["id"]
    moved = job_id[:-4] + tag
    for key in (store.RqKeys.job, store.Keys.request):
        worker.redis.rename(key(job_id), key(moved))
    other_server.kill()
    try:
        async with spread() as http:
            assert (await http.get(f"/v1/jobs/{moved}")).json()["status"] == "queued"
            assert (await http.get(f"/v1/jobs/{job_id}")).status_code == 503  # the other may have it
            assert (await http.post(f"/v1/jobs/{moved}/cancel")).json()["status"] == "canceled"
    finally:
        other_server.start()


async def test_jobs_that_a_move_has_left_behind_are_told_about(
    serving: Serving,
    spread: Serving,
    worker: FakeWorker,
    big: FakeWorker,
    other: Redis,
    caplog: pytest.LogCaptureFixture,
):
    """`big` has moved away from home, and `small` from the other server to home."""

    def lines() -> list[str]:
        return [text for record in caplog.records if "wait in the queue" in (text := record.getMessage())]

    async with serving() as http:
        ids = [(await http.post("/v1/jobs", json=score(model="big", wait_for_model=True))).json()["id"] for _ in "ab"]
    async with spread() as http:
        assert (await http.post("/v1/jobs", json=score())).status_code == 202
        assert (await submit(http))[0] == 202
        other.sadd("rq:queues", "rq:queue:small")
        other.rpush("rq:queue:small", "0" * 32)
        stranded = http._transport.app.state.scorepool.stranded_jobs  # type: ignore[attr-defined]
        await stranded.look()
        await stranded.look()
        assert [line.partition(", where")[0] for line in sorted(lines())] == [
            "1 jobs wait in the queue small on the Redis of SCOREPOOL_REDIS_URLS['big']",
            "2 jobs wait in the queue big on the Redis of SCOREPOOL_REDIS_URL",
        ]
        for job_id in ids:
            assert (await http.post(f"/v1/jobs/{job_id}/cancel")).status_code == 200
        await stranded.look()
        assert len(lines()) == 2
