"""Adapters are loaded on all workers of a model or on none, by operators."""

import asyncio
from typing import Any

import pytest
from redis import Redis

from scorepool import store, wire
from tests.api.conftest import ALICE, BOB, KEYS, Serving, bearer, eventually, score
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio
LOAD = {"lora_name": "sql", "lora_path": "/adapters/sql"}


def adapter(fingerprint: str = "a" * 64) -> wire.ServedAdapter:
    return wire.ServedAdapter(name="sql", fingerprint=fingerprint, path="/adapters/sql", rank=8)


def record(redis: Redis) -> wire.AdapterRecord | None:
    value = record_bytes(redis)
    return None if value is None else wire.parse(value, wire.AdapterRecord, "msgpack")


def record_bytes(redis: Redis) -> bytes | None:
    return redis.hget(store.Keys.adapters("demo"), "sql")


def report(redis: Redis, worker: FakeWorker, **values: Any) -> None:
    """Report what a worker found of the adapter that is staged."""
    staged = record(redis)
    assert staged is not None
    field = f"{staged.serial}:{worker.name}"
    redis.hset(store.Keys.adapter_reports("demo"), field, wire.encode(wire.AdapterReport(**values)))


@pytest.fixture
def two(redis: Redis) -> list[FakeWorker]:
    workers = [FakeWorker(redis, name=name) for name in ("w1", "w2")]
    for worker in workers:
        worker.register()
    return workers


async def test_an_adapter_is_served_when_all_workers_show_it(serving: Serving, redis: Redis, two: list[FakeWorker]):
    async with serving() as http:
        loading = asyncio.create_task(http.post("/v1/load_lora_adapter", json=LOAD))
        await eventually(lambda: record(redis))
        report(redis, two[0], fingerprint="a" * 64)
        await asyncio.sleep(0.3)
        assert record(redis).state == "staged"
        report(redis, two[1], fingerprint="a" * 64)
        await eventually(lambda: record(redis).state == "served")
        two[0].register(adapters=[adapter()])
        await asyncio.sleep(0.3)
        assert not loading.done()
        for waits in (False, True):  # no worker drains the queue of an adapter's name
            refused = await http.post("/v1/jobs", json=score(model="sql", wait_for_model=waits))
            assert refused.status_code == 404
            assert f"the worker {two[1].name} of 'demo' has no adapter 'sql'" in refused.json()["error"]["message"]
        two[1].register(adapters=[adapter()])

        assert (await loading).text == "Success: LoRA adapter 'sql' added successfully."
        assert (await http.post("/v1/jobs", json=score(model="sql"))).status_code == 202


async def test_the_name_of_an_unloaded_adapter_is_free_whatever_a_late_worker_shows(
    serving: Serving, redis: Redis, two: list[FakeWorker]
):
    unloaded = wire.AdapterRecord(serial="s", path="", state="unloaded")
    async with serving() as http:
        two[1].register(adapters=[adapter()])
        refused = await http.post("/v1/load_lora_adapter", json=LOAD)
        redis.hset(store.Keys.adapters("demo"), "sql", wire.encode(unloaded))
        loading = asyncio.create_task(http.post("/v1/load_lora_adapter", json=LOAD))
        await eventually(lambda: record(redis).state == "staged")
        for worker in two:
            report(redis, worker, fingerprint="a" * 64)
            worker.register(adapters=[adapter()])
        assert (await loading).status_code == 200
    assert (refused.status_code, "is loaded already" in refused.text) == (400, True)


async def test_an_adapter_is_not_unloaded_while_no_worker_says_so(
    serving: Serving, redis: Redis, two: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("scorepool.api.repositories.adapters.WAIT_S", 0.5)
    for worker in two:
        worker.register(adapters=[adapter()])
    async with serving() as http:
        unloading = asyncio.create_task(http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}))
        await eventually(lambda: record(redis))
        redis.delete(store.Keys.models)
        assert (await unloading).status_code == 503


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"error": "adapter 'sql' cannot be loaded: it has NaN"}, "the worker w2 cannot load it: adapter 'sql' cannot"),
        ({"fingerprint": "b" * 64}, "the workers have different adapters in this folder"),
    ],
)
async def test_no_worker_serves_what_one_cannot_load(
    values: dict[str, str], message: str, serving: Serving, redis: Redis, two: list[FakeWorker]
):
    async with serving() as http:
        loading = asyncio.create_task(http.post("/v1/load_lora_adapter", json=LOAD))
        await eventually(lambda: record(redis))
        report(redis, two[0], fingerprint="a" * 64)
        report(redis, two[1], **values)

        reply = await loading

    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
    assert record(redis) is None


async def test_what_is_served_stays_known_when_the_process_that_replaces_it_dies(
    serving: Serving, redis: Redis, two: list[FakeWorker]
):
    served = wire.AdapterRecord(serial="a", path="/adapters/sql", state="served")
    redis.hset(store.Keys.adapters("demo"), "sql", wire.encode(served))
    for worker in two:
        worker.register(adapters=[adapter()])
    left = None  # by a process that dies
    async with serving() as http:
        for _ in range(2):
            loading = asyncio.create_task(http.post("/v1/load_lora_adapter", json=LOAD | {"load_inplace": True}))
            await eventually(lambda left=left: record(redis).state == "staged" and record_bytes(redis) != left)
            left = record_bytes(redis)
            assert record(redis).in_force == served
            report(redis, two[0], error="it has NaN")
            assert (await loading).status_code == 400
            assert record(redis) == served
            redis.hset(store.Keys.adapters("demo"), "sql", left)


async def test_only_operators_may_change_adapters(serving: Serving, two: list[FakeWorker]):
    async with serving(api_keys=KEYS, operator_keys="bob") as http:
        for path, body in (("load", LOAD), ("unload", {"lora_name": "sql"})):
            url = f"/v1/{path}_lora_adapter"
            assert (await http.post(url, json=body)).status_code == 401
            assert (await http.post(url, json=body, headers=bearer(ALICE))).status_code == 403
        reply = await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}, headers=bearer(BOB))
        assert reply.status_code == 404


async def test_one_change_of_a_model_runs_at_a_time(serving: Serving, redis: Redis, two: list[FakeWorker]):
    redis.set(store.Keys.adapters_lock("demo"), "1")

    async with serving() as http:
        reply = await http.post("/v1/load_lora_adapter", json=LOAD)

    assert reply.status_code == 409
    assert "another adapter of 'demo' is being loaded" in reply.json()["error"]["message"]
