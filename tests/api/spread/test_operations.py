"""What an operator sees and does of two servers together: metrics, the page, a pause, weights, adapters."""

import asyncio
from pathlib import Path

import pytest
from redis import Redis

from scorepool import store, wire
from scorepool.api.metrics.queue_snapshot import ResultCacheState
from scorepool.api.spread.spread_snapshots import add
from scorepool.store.object_store import ObjectStore
from scorepool.store.result_store import path_of_lease
from tests.api.conftest import Serving, eventually, score
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio


async def test_metrics_add_the_servers_up(
    spread: Serving, worker: FakeWorker, big: FakeWorker, redis: Redis, other: Redis
):
    redis.hset(store.Keys.outcome_counts, mapping={"result": 3, "timeout": 1})
    other.hset(store.Keys.outcome_counts, mapping={"result": 4})
    async with spread() as http:
        for model in ("demo", "big", "big"):
            await http.post("/v1/jobs", json=score(model=model))
        await http.post("/v1/jobs", json=score(model="nobody", wait_for_model=True))
        redis.sadd("rq:workers:webhooks", "rq:worker:wh")  # on home only
        redis.hset("rq:worker:wh", "last_heartbeat", "2026-11-26T00:00:00.000000Z")
        lines = set[str]()
        while 'scorepool_queue_jobs{queue="big",state="queued"} 2.0' not in lines:  # a snapshot is used again for 3 s
            lines = set((await http.get("/metrics")).text.splitlines())
        page = (await http.get("/")).text
    assert {
        'scorepool_queue_jobs{queue="demo",state="queued"} 1.0',
        'scorepool_queue_jobs{queue="big",state="queued"} 2.0',
        'scorepool_queue_jobs{queue="(unserved)",state="queued"} 1.0',
        'scorepool_outcomes_total{code="result"} 7.0',
        'scorepool_outcomes_total{code="timeout"} 1.0',
        "scorepool_redis_up 1.0",
        'scorepool_workers{model="webhooks"} 0.0',
    } <= lines
    assert ">demo<" in page
    assert ">big<" in page


async def test_the_page_lists_and_ends_jobs_of_both_servers(spread: Serving, worker: FakeWorker, big: FakeWorker):
    async with spread() as http:
        ids = [(await http.post("/v1/jobs", json=score(model=model))).json()["id"] for model in ("demo", "big")]
        page = (await http.get("/jobs")).text
        assert [job_id for job_id in ids if f'href="/jobs/{job_id}"' in page] == ids
        own = {"Origin": str(http.base_url), "Sec-Fetch-Site": "same-origin"}
        replies = [await http.post(f"/jobs/{job_id}/cancel", headers=own) for job_id in ids]
        assert [reply.status_code for reply in replies] == [303, 303]
        statuses = [(await http.get(f"/v1/jobs/{job_id}")).json()["status"] for job_id in ids]
    assert statuses == ["canceled", "canceled"]


async def test_objects_of_both_servers_that_no_job_needs_are_deleted(
    spread: Serving, redis: Redis, other: Redis, tmp_path: Path
):
    objects = ObjectStore(tmp_path.as_uri())
    leases = {redis: f"{'a' * 32}:{'a' * 8}", other: f"{'b' * 32}:{'b' * 8}"}
    for server, lease_key in leases.items():
        objects.put(path_of_lease(lease_key), b"a result")
        server.zadd(store.Keys.stored_results, {lease_key: 1})
    async with spread(result_store=tmp_path.as_uri()):
        await eventually(lambda: not any((tmp_path / path_of_lease(each)).exists() for each in leases.values()))


def test_snapshots_are_added_field_by_field():
    assert add({"a": 1, "b": 2}, {"b": 3, "c": 4}) == {"a": 1, "b": 5, "c": 4}
    assert add({"a": [1]}, {"a": [2]}) == {"a": [1, 2]}
    assert add(3.0, 2.0) == 3.0  # ages
    one, two = ResultCacheState(uses={"hit": 1}, bytes=5), ResultCacheState(uses={"hit": 2}, bytes=6)
    assert add(one, two) == ResultCacheState(uses={"hit": 3}, bytes=11)


async def test_a_worker_on_the_wrong_server_serves_nothing(
    spread: Serving, worker: FakeWorker, other: Redis, caplog: pytest.LogCaptureFixture
):
    """Its own check stops it; one of an earlier release has none."""
    FakeWorker(other, "astray", "w3").register()
    async with spread() as http:
        assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["demo"]
        assert (await http.post("/v1/jobs", json=score(model="astray"))).status_code == 404
    lines = [record.getMessage() for record in caplog.records if "w3" in record.getMessage()]
    assert lines == [
        "the worker w3 serves astray on the Redis of SCOREPOOL_REDIS_URLS['big'] and gets no jobs: the map puts that "
        "model on another"
    ]


async def test_a_pause_holds_on_both_servers(
    spread: Serving, worker: FakeWorker, big: FakeWorker, redis: Redis, other: Redis
):
    async with spread() as http:
        job_id = (await http.post("/v1/jobs", json=score(model="big"))).json()["id"]
        big.start(job_id)
        paused = asyncio.create_task(http.post("/pause?mode=wait&clear_cache=false"))
        while not (await http.get("/is_paused")).json()["is_paused"]:
            pass
        assert [server.exists(store.Keys.paused) for server in (redis, other)] == [1, 1]
        await asyncio.sleep(0.1)
        assert not paused.done()
        big.end(job_id)
        assert (await paused).status_code == 200
        await http.post("/resume")
    assert [server.exists(store.Keys.paused) for server in (redis, other)] == [0, 0]


async def test_weights_and_adapters_are_those_of_the_models_server(
    spread: Serving, worker: FakeWorker, big: FakeWorker, redis: Redis, other: Redis
):
    other.hset(store.Keys.weights("big"), mapping={"label": "step 7"})
    adapter = wire.ServedAdapter(name="ada", fingerprint="e" * 16, path="/a", rank=8)
    big.register(aliases=["large"], adapters=[adapter])
    async with spread() as http:
        assert (await http.get("/v1/models/large/weights")).json()["label"] == "step 7"
        assert (await http.get("/v1/models/demo/weights")).json()["label"] is None
        job_id = (await http.post("/v1/jobs", json=score(model="ada"))).json()["id"]
        assert (await http.get(f"/v1/jobs/{job_id}")).json()["model"] == "big"
    assert big.waiting() == {job_id}
