"""A deployment of two Redis servers is one to its clients: each job is wholly on the server of its model."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from redis import Redis

from scorepool import store
from tests.api.conftest import KEYS, Serving, bearer, eventually, generate, score
from tests.api.fake_worker import COMPLETED, FakeWorker

pytestmark = pytest.mark.anyio


async def submit(http: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> str:
    reply = await http.post("/v1/jobs", json=body, headers=headers)
    assert reply.status_code in (200, 202), reply.text
    return str(reply.json()["id"])


async def listed(http: httpx.AsyncClient, limit: int, query: str = "") -> list[list[str]]:
    """Return the ids of all pages of jobs."""
    pages, cursor = [], ""
    while True:
        page = (await http.get(f"/v1/jobs?limit={limit}{query}{cursor}")).json()
        pages.append([job["id"] for job in page["jobs"]])
        if page["next_cursor"] is None:
            return pages
        cursor = f"&cursor={page['next_cursor']}"


async def test_each_job_is_wholly_on_the_server_of_its_model(
    spread: Serving, worker: FakeWorker, big: FakeWorker, redis: Redis, other: Redis
):
    async with spread() as http:
        names = [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
        ids = {name: await submit(http, score(model=name)) for name in ("demo", "big", "large")}
        assert names == ["big", "demo", "large"]
        assert worker.waiting() == {ids["demo"]}
        assert big.waiting() == {ids["big"], ids["large"]}
        for key in (store.RqKeys.job, store.Keys.request):
            assert [server.exists(key(ids["demo"])) for server in (redis, other)] == [1, 0]
            assert [server.exists(key(ids["big"])) for server in (redis, other)] == [0, 1]
        waits = [asyncio.create_task(http.get(f"/v1/jobs/{job_id}?wait=60")) for job_id in ids.values()]
        await eventually(lambda: len(http._transport.app.state.scorepool.waiting) == 3)  # type: ignore[attr-defined]
        worker.end(ids["demo"])
        big.end(ids["big"])
        big.end(ids["large"])
        jobs = [(await wait).json() for wait in waits]
        assert [(job["model"], job["status"]) for job in jobs] == [
            ("demo", "finished"), ("big", "finished"), ("big", "finished"),
        ]  # fmt: skip
        together = await http.get("/v1/jobs/ended", params={"ids": ",".join(ids.values())})
        assert together.json() == jobs
        assert [(await http.delete(f"/v1/jobs/{job_id}")).status_code for job_id in ids.values()] == [204] * 3
        assert [(await http.get(f"/v1/jobs/{job_id}")).status_code for job_id in ids.values()] == [404] * 3


async def test_a_poll_asks_only_the_server_that_the_id_names(
    spread: Serving, worker: FakeWorker, big: FakeWorker, redis: Redis
):
    async with spread() as http:
        job_id = await submit(http, score(model="big"))
        redis.config_resetstat()
        assert (await http.get(f"/v1/jobs/{job_id}")).status_code == 200
        scripts = redis.info("commandstats")
    assert not {"cmdstat_evalsha", "cmdstat_eval", "cmdstat_hmget"} & set(scripts)


async def test_ids_of_jobs_that_the_map_has_moved_stay_valid(
    serving: Serving, worker: FakeWorker, big: FakeWorker, redis: Redis, urls: str
):
    """They were accepted by a deployment of one server, or before a model was given another URL."""
    async with serving() as http:
        old = await submit(http, score(model="big", wait_for_model=True))
    async with serving(redis_urls=urls) as http:
        new = await submit(http, score(model="big"))
        assert (await http.get(f"/v1/jobs/{old}")).json()["status"] == "queued"
        assert (await http.post(f"/v1/jobs/{old}/cancel")).json()["status"] == "canceled"
        assert await listed(http, 10) == [[new, old]]
    async with serving(redis_url=json.loads(urls)["big"]) as http:  # the server that the id names, as the only one
        assert (await http.get(f"/v1/jobs/{new}")).json()["status"] == "queued"


async def test_a_list_merges_the_servers_and_each_job_is_on_one_page(
    spread: Serving, worker: FakeWorker, big: FakeWorker, redis: Redis, other: Redis
):
    async with spread() as http:
        ids = [await submit(http, score(model=("demo", "big")[number % 3 == 0])) for number in range(12)]
        for server in (redis, other):  # jobs of one microsecond are not divided by a cursor
            for number, job_id in enumerate(ids):
                at = f"{1_795_000_000 + number // 2}.000000"
                if server.exists(store.RqKeys.job(job_id)):
                    server.zadd(store.Keys.jobs_of("local"), {job_id: at})
                    server.hset(store.RqKeys.job(job_id), store.JobField.CREATED, at)
        for limit in (2, 3, 5, 50):
            pages = await listed(http, limit)
            assert sorted(job_id for page in pages for job_id in page) == sorted(ids)
            assert all(len(page) <= limit for page in pages)
            assert [ids.index(job_id) // 2 for page in pages for job_id in page] == [5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0]
        assert await listed(http, 50, "&model=big") == [[ids[9], ids[6], ids[3], ids[0]]]


async def test_one_request_has_jobs_of_one_server(spread: Serving, worker: FakeWorker, big: FakeWorker):
    async with spread() as http:
        bulk = await http.post("/v1/jobs/bulk", json=[score(), score(model="large")])
        items = [{"prompt": "a", "completion": "b"}]
        compare = await http.post("/v1/jobs", json={"type": "compare", "model": "big", "base": "demo", "items": items})
        both = await http.post("/v1/jobs/bulk", json=[score(model="big"), score(model="large")])
    assert [(reply.status_code, reply.json()["error"]["field"]) for reply in (bulk, compare)] == [
        (400, "[1].model"), (400, "base"),
    ]  # fmt: skip
    assert "'large' and 'demo' are on two Redis servers (SCOREPOOL_REDIS_URLS)" in bulk.json()["error"]["message"]
    assert both.status_code == 202
    assert worker.waiting() == set()
    assert big.waiting() == {job["id"] for job in both.json()}


async def test_a_key_is_one_job_on_both_servers(spread: Serving, worker: FakeWorker, big: FakeWorker):
    key = {"Idempotency-Key": "order-1"}
    async with spread() as http:
        first = await http.post("/v1/jobs", json=score(model="big"), headers=key)
        again = await http.post("/v1/jobs", json=score(model="big"), headers=key)
        reused = await http.post("/v1/jobs", json=score(), headers=key)
    assert first.json()["id"] == again.json()["id"]
    assert (again.json()["is_replay"], reused.status_code) == (True, 409)
    assert (worker.waiting(), big.waiting()) == (set(), {first.json()["id"]})


async def test_tokens_stream_from_both_servers(spread: Serving, worker: FakeWorker, big: FakeWorker):
    async with spread() as http:
        for model, fake in (("demo", worker), ("big", big)):
            body = {"model": model, "prompt": "a", "stream": True}
            while (await http.get("/readyz")).json().get("unavailable", "absent") != "absent":
                pass
            dialect = asyncio.create_task(http.post("/v1/completions", json=body))
            await eventually(fake.waiting)
            job_id = fake.waiting().pop()
            fake.start(job_id)
            fake.stream(job_id, 0, 2)
            fake.end(job_id, COMPLETED)
            assert (await dialect).text.endswith("data: [DONE]\n\n")
            job_id = await submit(http, generate(model=model, stream=True))
            fake.stream(job_id, 0, 2)  # before anybody listens
            events = asyncio.create_task(http.get(f"/v1/jobs/{job_id}/events"))
            await eventually(lambda: http._transport.app.state.scorepool.waiting._waiters)  # type: ignore[attr-defined]
            fake.end(job_id, COMPLETED)
            assert [line for line in (await events).text.splitlines() if line.startswith("event:")] == [
                "event: tokens", "event: end",
            ]  # fmt: skip


async def test_synchronous_requests_and_kept_responses_of_both_servers(
    spread: Serving, worker: FakeWorker, big: FakeWorker
):
    async with spread() as http:
        for model, fake in (("demo", worker), ("large", big)):
            body = {"model": model, "input": [{"role": "user", "content": "a"}], "background": True}
            response = (await http.post("/v1/responses", json=body)).json()
            fake.end(fake.waiting().pop(), COMPLETED)
            read = (await http.get(f"/v1/responses/{response['id']}")).json()
            assert (read["status"], read["id"]) == ("completed", response["id"])


async def test_a_response_continues_one_of_the_other_server(spread: Serving, worker: FakeWorker, big: FakeWorker):
    async with spread() as http:
        said = []
        for fake, previous in ((big, {}), (worker, "big"), (big, "demo")):
            more = {"previous_response_id": said[-1]} if previous else {}
            body = {"model": fake.model, "input": "a", "background": True, **more}
            reply = await http.post("/v1/responses", json=body)
            assert reply.status_code == 200, reply.text
            said.append(reply.json()["id"])
            fake.end(fake.waiting().pop(), COMPLETED)
        request = big.redis.get(store.Keys.request(said[-1].removeprefix("resp_")))
    assert request is not None
    assert request.count(b"assistant") == 2  # the answers of both servers


async def test_quotas_and_depths_are_those_of_each_server(spread: Serving, worker: FakeWorker, big: FakeWorker):
    async with spread(api_keys=KEYS, max_jobs_per_key=1) as http:
        alice = bearer("alice-key")
        models = ("demo", "demo", "big", "big")
        replies = [await http.post("/v1/jobs", json=score(model=model), headers=alice) for model in models]
    assert [reply.status_code for reply in replies] == [202, 429, 202, 429]
