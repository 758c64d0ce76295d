"""No route of the OpenAPI document lets a key read, change or detect what another key created."""

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
OPEN = {"/healthz", "/readyz", "/health", "/metrics"}  # the only routes that need no key
OPERATIONS = [
    (method, path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    if path not in OPEN
]
MARK = "created-by-alice"
ABSENT = "0" * 32


async def create_objects_of_alice(http: httpx.AsyncClient, worker: FakeWorker) -> list[str]:
    """Create one object of each kind as Alice, and return their ids."""
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
    await eventually(lambda: not worker.redis.exists(store.Keys.batches))  # the batch ended: its file is empty
    return [*jobs, endpoint_id, *deliveries, file, batch]


def dump_state(redis: Redis) -> dict[bytes, bytes | None]:
    """Dump Alice's state: all keys but Bob's, the one that any request may write, and the time that her batch takes."""
    others = (b"scorepool:probe", store.Keys.batch_turns.encode())
    return {key: redis.dump(key) for key in redis.scan_iter() if b"bob" not in key and key not in others}


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def url_and_query(path: str, operation: dict[str, Any], object_id: str) -> tuple[str, dict[str, str]]:
    """Return the URL and query with `object_id` wherever the route takes an id."""
    parameters = operation.get("parameters", [])
    for name in [parameter["name"] for parameter in parameters if parameter["in"] == "path"]:
        path = path.replace(f"{{{name}}}", object_id)
    return path, {
        parameter["name"]: object_id
        for parameter in parameters
        if parameter["in"] == "query" and parameter["name"].endswith("_id")
    }


def bodies_with_id(operation: dict[str, Any], object_id: str) -> list[Any]:
    """Return JSON bodies with `object_id` in every field that takes an id."""
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" not in content:
        return [None]
    schema = resolve(content["application/json"]["schema"])
    properties = schema.get("properties", {})
    named = {name: object_id for name in properties if name.endswith("_id") or name == "id"}
    other_fields: list[dict[str, Any]] = [
        {},
        {"since": 0},
        {"disabled": True},
        {"url": "https://bob.example/"},
        {"endpoint": "/v1/completions", "completion_window": "24h"},
    ]
    return [named | fields for fields in other_fields]


async def test_no_route_lets_bob_read_change_or_detect_alices_objects(
    serving: Serving, redis: Redis, worker: FakeWorker
):
    """Call every route with the id of each of her objects in every place that takes an id."""
    async with serving(api_keys=KEYS) as http:
        ids = await create_objects_of_alice(http, worker)
        before = dump_state(redis)
        for (method, path, operation), object_id in product(OPERATIONS, ids):
            url, query = url_and_query(path, operation, object_id)
            for body in bodies_with_id(operation, object_id):
                reply = await http.request(method, url, json=body, params=query, headers=bearer(BOB))
                shown = reply.text.replace(object_id, "")
                assert not any(other in shown for other in ids), (method, path)
                assert MARK not in shown, (method, path)
                if "{" in path:
                    of_operators = (403,) if "403" in operation["responses"] else ()  # whatever the id
                    assert reply.status_code in (400, 404, *of_operators), (method, path, reply.status_code)
                    absent = await http.request(method, url.replace(object_id, ABSENT), json=body, headers=bearer(BOB))
                    assert reply.status_code == absent.status_code
        after = dump_state(redis)
        assert {key: after.get(key) for key in before} == before


async def test_every_route_but_the_health_routes_requires_a_key(serving: Serving):
    async with serving(api_keys=KEYS) as http:
        for method, path, _ in OPERATIONS:
            for headers in ({}, bearer("no"), {"Authorization": "Basic YTpi"}, {"Authorization": f"Bearer {ALICE}x"}):
                reply = await http.request(method, path.replace("{id}", ABSENT), headers=headers)
                assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
