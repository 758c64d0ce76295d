"""What one key made, no other key reads, changes or learns of: on every route of the OpenAPI, new ones included."""

from itertools import product
from typing import Any

import httpx
import pytest
from redis import Redis

from scorepool import store
from scorepool.api.app import create_app
from tests.api.conftest import ALICE, BOB, KEYS, Serving, bearer, eventually, score
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio
DOCUMENT = create_app(store.Settings()).openapi()
OPEN = {"/healthz", "/readyz", "/health", "/metrics"}  # no route else is without a key
OPERATIONS = [
    (method, path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    if path not in OPEN
]
MARK = "alices-own"
ABSENT = "0" * 32


async def alices(http: httpx.AsyncClient, worker: FakeWorker) -> list[str]:
    """Ids of one of each thing that a key can make."""
    headers = bearer(ALICE)
    endpoint = {"url": f"https://{MARK}.example/", "description": MARK}
    endpoint_id = (await http.post("/v1/webhooks/endpoints", json=endpoint, headers=headers)).json()["endpoint"]["id"]
    jobs = [
        (await http.post("/v1/jobs", json=score(webhook=f"https://{MARK}.example/"), headers=headers)).json()["id"]
        for _ in range(3)
    ]
    worker.start(jobs[1])
    worker.end(jobs[2])
    deliveries = [store.Keys.delivery(jobs[2]), f"{store.Keys.delivery(jobs[2])}_{endpoint_id}"]
    worker.fail_delivery(deliveries[0])
    upload = {"files": {"file": (f"{MARK}.jsonl", b"")}, "data": {"purpose": "batch"}}
    file = (await http.post("/v1/files", **upload, headers=headers)).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {MARK: MARK}}
    batch = (await http.post("/v1/batches", json=body, headers=headers)).json()["id"]
    await eventually(lambda: not worker.redis.exists(store.Keys.batches))  # it has ended: an empty file is no batch
    return [*jobs, endpoint_id, *deliveries, file, batch]


def state(redis: Redis) -> dict[bytes, bytes | None]:
    """All that is Alice's: every key but those that any request may touch."""
    return {key: redis.dump(key) for key in redis.scan_iter() if b"bob" not in key and key != b"scorepool:probe"}


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def addressed(path: str, operation: dict[str, Any], id_: str) -> tuple[str, dict[str, str]]:
    """The URL and query that name a thing of hers wherever the route names one."""
    parameters = operation.get("parameters", [])
    for name in [one["name"] for one in parameters if one["in"] == "path"]:
        path = path.replace(f"{{{name}}}", id_)
    return path, {one["name"]: id_ for one in parameters if one["in"] == "query" and one["name"].endswith("_id")}


def bodies(operation: dict[str, Any], id_: str) -> list[Any]:
    """JSON bodies in which every field that could name a thing names hers."""
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" not in content:
        return [None]
    schema = resolve(content["application/json"]["schema"])
    properties = schema.get("properties", {})
    named = {name: id_ for name in properties if name.endswith("_id") or name == "id"}
    rests: list[dict[str, Any]] = [
        {},
        {"since": 0},
        {"disabled": True},
        {"url": "https://bob.example/"},
        {"endpoint": "/v1/completions", "completion_window": "24h"},
    ]
    return [named | rest for rest in rests]


async def test_bob_meets_none_of_alices_things_on_any_route(serving: Serving, redis: Redis, worker: FakeWorker):
    """Every route, with the id of every thing that is hers in every place that takes an id."""
    async with serving(api_keys=KEYS) as http:
        ids = await alices(http, worker)
        before = state(redis)
        for (method, path, operation), id_ in product(OPERATIONS, ids):
            url, query = addressed(path, operation, id_)
            for body in bodies(operation, id_):
                foreign = await http.request(method, url, json=body, params=query, headers=bearer(BOB))
                told = foreign.text.replace(id_, "")
                assert not any(other in told for other in ids), (method, path)
                assert MARK not in told, (method, path)
                if "{" in path:
                    assert foreign.status_code in (400, 404), (method, path, foreign.status_code)
                    absent = await http.request(method, url.replace(id_, ABSENT), json=body, headers=bearer(BOB))
                    assert foreign.status_code == absent.status_code
        after = state(redis)
        assert {key: after.get(key) for key in before} == before


async def test_every_route_but_those_of_operations_asks_for_a_key(serving: Serving):
    async with serving(api_keys=KEYS) as http:
        for method, path, _ in OPERATIONS:
            for headers in ({}, bearer("no"), {"Authorization": "Basic YTpi"}, {"Authorization": f"Bearer {ALICE}x"}):
                reply = await http.request(method, path.replace("{id}", ABSENT), headers=headers)
                assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
