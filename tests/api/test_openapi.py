"""The OpenAPI document: it is valid, declares every reply of every route, and is written in plain words."""

import ast
import asyncio
import io
import json
import re
import tokenize
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace
from redis import Redis

import scorepool.api.http.bodies
import scorepool.api.repositories.files
from scorepool import wire
from scorepool.api.app import DIALECTS, create_app
from scorepool.api.http import held_bytes, large_replies
from scorepool.api.repositories.webhook_deliveries import MAX_ASKED_FOR
from scorepool.api.repositories.webhook_endpoints import MAX_ENDPOINTS
from scorepool.store import Keys, RqKeys, Settings
from scorepool.store.scripts import load
from tests.api.conftest import ALICE, BOB, KEYS, Serving, bearer, score, trickle
from tests.api.fake_worker import CLASSIFIED, COMPLETED, RESULT, FakeWorker


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app(Settings()).openapi()


def validator(document: dict[str, Any], schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    whole = schema | {"components": document["components"]}
    jsonschema.Draft202012Validator.check_schema(whole)
    return jsonschema.Draft202012Validator(whole)


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(value) for value in node.values()))
    return set().union(*(references(value) for value in node)) if isinstance(node, list) else set()


def test_the_document_is_valid_and_complete(document: dict[str, Any]):
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    assert {name.removeprefix("#/components/schemas/") for name in references(document)} <= set(schemas)
    assert {"Score", "Generate", "Job", "Result", "Failure", "ErrorReply", "ServedModel", "JobPage"} <= set(schemas)
    assert not any("HTTPValidationError" in name for name in schemas)
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    operations = [(path, method) for path, methods in document["paths"].items() for method in methods]
    assert len(operations) == 83
    ids = [document["paths"][path][method]["operationId"] for path, method in operations]
    assert len(set(ids)) == len(ids)


def test_every_operation_declares_its_errors_and_its_authentication(document: dict[str, Any]):
    for path, methods in document["paths"].items():
        names = {"/ErrorReply"}
        if path.startswith("/v1/messages"):
            names = {"/AnthropicErrorReply"}
        elif path in ("/", "/generate", "/generate_stream", "/info"):
            names = {"/TextGenerationErrorReply"} | (names if path == "/generate" else set())
        for operation in methods.values():
            assert "422" not in operation["responses"]
            for status, reply in operation["responses"].items():
                if int(status) >= 400:
                    found = references(reply["content"]["application/json"]["schema"])
                    assert {f"/{reference.rpartition('/')[2]}" for reference in found} == names
            if path not in ("/healthz", "/readyz", "/health", "/metrics"):
                assert {"400", "401", "503", "500"} <= set(operation["responses"])
                assert operation["security"]


def test_the_declared_pattern_of_a_cursor_accepts_cursors(document: dict[str, Any]):
    [cursor] = [one for one in document["paths"]["/v1/jobs"]["get"]["parameters"] if one["name"] == "cursor"]
    schema = validator(document, cursor["schema"])
    assert schema.is_valid("1795232091.291358")
    assert not schema.is_valid("")


def test_exactly_the_events_of_a_job_are_declared(document: dict[str, Any]):
    content = document["paths"]["/v1/jobs/{id}/events"]["get"]["responses"]["200"]["content"]

    assert list(content) == ["text/event-stream"]
    kinds = {}
    for event in content["text/event-stream"]["schema"]["anyOf"]:
        data = event["properties"]["data"]["contentSchema"]["$ref"].rpartition("/")[2]
        kinds[event["properties"]["event"]["const"]] = document["components"]["schemas"][data]
    assert set(kinds) == {"tokens", "progress", "restart", "end"}
    assert (kinds["restart"]["properties"], kinds["restart"]["additionalProperties"]) == ({}, False)


def test_bodies_are_declared_for_json_and_msgpack(document: dict[str, Any]):
    for path in ("/v1/jobs", "/v1/jobs/bulk"):
        body = document["paths"][path]["post"]["requestBody"]
        assert set(body["content"]) == {"application/json", "application/msgpack"}
        schema = validator(document, body["content"]["application/json"]["schema"])
        wrap = (lambda request: [request]) if "bulk" in path else (lambda request: request)
        assert schema.is_valid(wrap(score()))
        assert not schema.is_valid(wrap(score(temperature=0)))
        assert not schema.is_valid(wrap(score(unknown=1)))
        assert not schema.is_valid(wrap(score(items=[{"prompt": "a", "completion": ""}])))
        assert not schema.is_valid(wrap(score(model="demo\n")))


FRAGMENT = re.compile(
    r"(Of|By|That|As|What|Where|From|In|To|Also|Or|Which|Whose|Whoever|For|When|Raises|Whether|Why|How|Who|So|But|And|"
    r"With|Without|On|At)\b"
)


def texts(node: Any) -> Iterator[str]:
    """List every summary and description in the document."""
    if isinstance(node, dict):
        yield from (node[name] for name in ("summary", "description") if isinstance(node.get(name), str))
        for value in node.values():
            yield from texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from texts(value)


def test_no_published_text_begins_with_a_fragment(document: dict[str, Any]):
    published = set(texts(document))
    assert len(published) > 100
    assert [text for text in published if FRAGMENT.match(text)] == []


def test_the_payloads_of_webhooks_are_declared(document: dict[str, Any]):
    assert set(document["webhooks"]) == {"job", "batch", "test"}
    assert {"JobEvent", "JobEventData", "TestEvent", "BatchEvent"} <= set(document["components"]["schemas"])


def test_every_message_is_described_under_a_name_of_its_own(document: dict[str, Any]):
    schemas = document["components"]["schemas"]
    assert [name for name, schema in schemas.items() if not schema.get("description")] == []
    assert [name for name in schemas if "." in name] == []  # msgspec adds the module to a name that two structs have
    assert "in nats.\nBytes are base64" in schemas["SequenceResult"]["description"]  # not indented as in the source


def test_no_field_of_a_published_message_is_explained_in_a_comment_only(document: dict[str, Any], root: Path):
    found = []
    for file in [*(root / "wire").rglob("*.py"), *(root / "api").rglob("*.py")]:
        source = file.read_text()
        comments = {
            token.start[0]: token.string
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT and "type: ignore" not in token.string
        }
        for struct in ast.walk(ast.parse(source)):
            if isinstance(struct, ast.ClassDef) and struct.name in document["components"]["schemas"]:
                fields = [field for field in struct.body if isinstance(field, ast.AnnAssign)]
                lines = range(struct.lineno, max((field.end_lineno or 0 for field in fields), default=0) + 1)
                found += [f"{file.name}:{line} {comments[line]}" for line in lines if line in comments]
    assert found == []


def test_every_operation_has_a_summary(document: dict[str, Any]):
    assert all(operation["summary"] for path in document["paths"].values() for operation in path.values())


WEBHOOK_ROUTES = [
    ("POST", "/v1/webhooks/endpoints"),
    ("GET", "/v1/webhooks/endpoints"),
    ("GET", "/v1/webhooks/endpoints/{id}"),
    ("PATCH", "/v1/webhooks/endpoints/{id}"),
    ("DELETE", "/v1/webhooks/endpoints/{id}"),
    ("POST", "/v1/webhooks/endpoints/{id}/secret"),
    ("GET", "/v1/webhooks/secret"),
    ("POST", "/v1/webhooks/secret"),
    ("POST", "/v1/webhooks/test"),
    ("GET", "/v1/webhooks/deliveries"),
    ("GET", "/v1/webhooks/deliveries/{id}"),
    ("POST", "/v1/webhooks/deliveries/{id}/replay"),
    ("POST", "/v1/webhooks/deliveries/replay"),
]


async def call_webhooks(call: Callable[..., Awaitable[Any]], worker: FakeWorker) -> None:
    """Send the requests of the webhook routes, except those with an invalid header or query."""
    endpoints, one = "/v1/webhooks/endpoints", "/v1/webhooks/endpoints/{id}"
    url = {"url": "https://hooks.example/"}
    id_ = (await call("POST", endpoints, json=url))["endpoint"]["id"]
    for method in ("GET", "POST"):
        await call(method, "/v1/webhooks/secret")
    for method, route in (
        ("POST", endpoints),
        ("PATCH", one),
        ("POST", "/v1/webhooks/test"),
        ("POST", "/v1/webhooks/deliveries/replay"),
    ):
        await call(method, route, id_, content=b"", headers={"Content-Type": "text/plain"})
        await call(method, route, id_, content=b" " * 6000, headers={"Content-Type": "application/json"})
    await call("GET", endpoints)
    await call("GET", one, id_)
    await call("POST", one + "/secret", id_)
    test = {"endpoint_id": id_}
    delivery = (await call("POST", "/v1/webhooks/test", json=test))["id"]
    await call("GET", "/v1/webhooks/deliveries")
    await call("GET", "/v1/webhooks/deliveries/{id}", delivery)
    await call("POST", "/v1/webhooks/deliveries/{id}/replay", delivery)
    worker.fail_delivery(delivery)
    await call("POST", "/v1/webhooks/deliveries/{id}/replay", delivery)
    await call("POST", "/v1/webhooks/deliveries/replay", json={"since": 0})
    await call("PATCH", one, id_, json={"disabled": True})
    await call("POST", "/v1/webhooks/test", json=test)
    await call("DELETE", one, id_)
    await call("POST", "/v1/webhooks/test", json=test)
    for _ in range(MAX_ENDPOINTS + 1):
        id_ = ((await call("POST", endpoints, json=url)).get("endpoint") or {"id": id_})["id"]
    for _ in range(MAX_ASKED_FOR):
        await call("POST", "/v1/webhooks/deliveries/replay", json={"since": 1e10})
    await call("POST", "/v1/webhooks/deliveries/{id}/replay", delivery)
    await call("POST", "/v1/webhooks/test", json={"endpoint_id": id_})


async def slow_form() -> AsyncIterator[bytes]:
    yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    async for byte in trickle():
        yield byte


async def call_batches(call: Callable[..., Awaitable[Any]]) -> None:
    """Send the requests of the routes of files and batches."""
    file, batch = "/v1/files/{id}", "/v1/batches/{id}"
    body = {"model": "demo", "prompt": "a"}  # no worker runs it, so the batch can be cancelled
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    form = {"files": {"file": ("a.jsonl", json.dumps(line).encode())}, "data": {"purpose": "batch"}}
    frame = {"endpoint": "/v1/completions", "completion_window": "24h"}
    id_ = (await call("POST", "/v1/files", **form))["id"]
    body = frame | {"input_file_id": id_}
    once = {"Idempotency-Key": "k"}
    made = (await call("POST", "/v1/batches", json=body, headers=once))["id"]
    await call("POST", "/v1/batches", json=body | {"completion_window": "1h"}, headers=once)  # 409
    await call("DELETE", file, id_)
    for route in ("/v1/files", "/v1/batches", file, file + "/content"):
        await call("GET", route, id_)
    with pytest.MonkeyPatch.context() as patch, large_replies.held_results("alice") as held:
        patch.setattr(held_bytes, "FREE_BYTES", -1)
        held.add(10**9)
        for route in ("/v1/files", "/v1/batches", file + "/content", "/v1/webhooks/deliveries"):
            await call("GET", route, id_)
    await call("GET", batch, made)
    await call("POST", batch + "/cancel", made)
    async with asyncio.timeout(60):
        while (await call("GET", batch, made))["status"] != "cancelled":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await call("POST", batch + "/cancel", made)
    await call("DELETE", file, id_)
    await call("POST", "/v1/batches", json=body)
    await call("POST", "/v1/files", **form | {"data": {"purpose": "vision"}})
    await call("POST", "/v1/files", files={"file": ("a", b"x" * 100_000)}, data={"purpose": "batch"})
    for route in ("/v1/files", "/v1/batches"):
        await call("POST", route, content=b"", headers={"Content-Type": "text/plain"})
        await call("POST", route, key=None, **(form if route == "/v1/files" else {"json": body}))
        await call("GET", route, query="?limit=0")
        await call("GET", route, key=None)
    await call("POST", "/v1/batches", json={})
    await call("POST", "/v1/batches", content=b" " * 6000, headers={"Content-Type": "application/json"})
    for method, route in [
        ("GET", file), ("DELETE", file), ("GET", file + "/content"), ("GET", batch), ("POST", batch + "/cancel"),
    ]:  # fmt: skip
        await call(method, route)
        await call(method, route, key=None)
        await call(method, route, query="?unknown=1")


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


async def call_adapters(call: Callable[..., Awaitable[Any]], redis: Redis, worker: FakeWorker, *, key: str) -> None:
    """Send the requests of the routes of adapters. No worker loads any: the test stands for it."""
    body = {"lora_name": "sql", "lora_path": "/adapters/sql"}
    records, adapter = Keys.adapters("demo"), wire.ServedAdapter(name="sql", fingerprint="a", path="/a", rank=8)
    loading = asyncio.create_task(call("POST", LOAD, json=body))
    while (value := redis.hget(records, "sql")) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    serial = wire.parse(value, wire.AdapterRecord, "msgpack").serial
    report = wire.encode(wire.AdapterReport(fingerprint="a"))
    redis.hset(Keys.adapter_reports("demo"), f"{serial}:{worker.name}", report)
    worker.register(adapters=[adapter])
    await loading
    unloading = asyncio.create_task(call("POST", UNLOAD, json={"lora_name": "sql"}))
    while b"unloaded" not in redis.hget(records, "sql"):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    worker.register()
    await unloading
    redis.set(Keys.adapters_lock("demo"), "1")
    for path, right in ((LOAD, body), (UNLOAD, {"lora_name": "sql"})):
        await call("POST", path, json=right)  # 409
        await call("POST", path, json=right | {"model": "none"})
        await call("POST", path, json=right, key=key)  # 403
        await call("POST", path, json=right, key=None)
        await call("POST", path, json={})
        await call("POST", path, content=b"", headers={"Content-Type": "text/plain"})
        await call("POST", path, content=b" " * 6000, headers={"Content-Type": "application/json"})
    redis.delete(Keys.adapters_lock("demo"), records)


WEIGHTS = "/v1/models/{id}/weights"
FOREIGN_WEIGHTS: dict[str, dict[str, Any]] = {
    "/update_weights_from_disk": {"model_path": "/models/new"},
    "/update_weight_version": {"new_version": "a"},
}


def push_id(redis: Redis) -> str:
    return wire.parse(redis.hget(Keys.weights("demo"), "pending_source") or b"", wire.WeightsSource, "msgpack").id


async def call_weights(call: Callable[..., Awaitable[Any]], redis: Redis, *, key: str) -> None:
    """Send the requests of the routes of weights. No worker loads any: the test stands for it."""
    path, body = WEIGHTS, {"path": "/models/new"}
    query = "?wait=0"
    redis.zadd(Keys.weights_workers("demo"), {"w1": 1e11})
    await call("GET", path, "demo")
    await call("POST", path, "demo", json=body, query=query)
    await call("POST", path, "demo", json=body, query=query)  # 409
    await call("POST", path, "demo", json=body, key=key)  # 403
    report = redis.register_script(load("report_weights.lua"))
    report(args=["demo", "w1", 1, push_id(redis), "f" * 64, ""])
    redis.hset(Keys.weights_moves("demo"), "w1", "2 1.5")
    pushing = asyncio.create_task(call("POST", path, "demo", json=body))
    while not redis.hexists(Keys.weights("demo"), "pending"):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    report(args=["demo", "w1", 2, push_id(redis), "e" * 64, ""])
    await pushing
    await call("POST", path, json=body)
    await call("POST", path, "demo", json={})
    await call("POST", path, "demo", content=b"", headers={"Content-Type": "text/plain"})
    await call("POST", path, "demo", content=b" " * 6000, headers={"Content-Type": "application/json"})
    for method in ("GET", "POST"):
        await call(method, path, key=None)
        await call(method, path)
        await call(method, path, "demo", headers={"Accept": "text/html"})
        await call(method, path, "demo", query="?unknown=1")
    for route, foreign in FOREIGN_WEIGHTS.items():
        await call("POST", route, json=foreign, key=None)
        await call("POST", route, json=foreign, key=key)  # 403
        await call("POST", route, json=foreign | {"model": "none"})
        await call("POST", route, json={})
        await call("POST", route, content=b"", headers={"Content-Type": "text/plain"})
        await call("POST", route, content=b" " * 6000, headers={"Content-Type": "application/json"})
    assert (await call("POST", "/update_weight_version", json={"new_version": "a"}))["new_version"] == "a"
    redis.hset(
        Keys.weights("demo"), mapping={"pending": 3, "pending_source": wire.encode(wire.WeightsSource(path="/a"))}
    )
    await call("POST", "/update_weights_from_disk", json={"model_path": "/models/new"})  # 409
    redis.hdel(Keys.weights("demo"), "pending", "pending_source")
    redis.hset(Keys.weights_moves("demo"), "w1", "3 1.5")
    pushing = asyncio.create_task(call("POST", "/update_weights_from_disk", json={"model_path": "/models/new"}))
    while not redis.hexists(Keys.weights("demo"), "pending"):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    report(args=["demo", "w1", 3, push_id(redis), "d" * 64, ""])
    assert (await pushing)["success"]
    for route in ("/weight_info", "/get_weight_version"):
        assert await call("GET", route) == {"weight_version": "3"}
        await call("GET", route, key=None)
        await call("GET", route, query="?model=none")
        await call("GET", route, query="?unknown=1")
    redis.delete(Keys.weights("demo"), Keys.weights_workers("demo"), Keys.weights_moves("demo"))


async def call_vllm_server(call: Callable[..., Awaitable[Any]], redis: Redis, *, key: str) -> None:
    """Send the requests of the routes of a vLLM server itself. The test stands for a worker that listens."""
    for route in ("/server_info", "/get_world_size", "/info"):
        await call("GET", route)
        await call("GET", route, key=None)
        await call("GET", route, query="?unknown=1")
    route = "/reset_prefix_cache"
    with redis.pubsub() as pubsub:
        pubsub.subscribe(Keys.reset_prefix_cache)
        while pubsub.get_message(timeout=60) is None:
            pass
        await call("POST", route)
    await call("POST", route, key=None)
    await call("POST", route, key=key)  # 403
    await call("POST", route, json={"reset_running_requests": True})
    await call("POST", route, content=b"a", headers={"Content-Type": "text/plain"})
    await call("POST", route, content=b" " * 6000, headers={"Content-Type": "application/json"})


async def call_pause(call: Callable[..., Awaitable[Any]], redis: Redis, *, key: str) -> None:
    """Send the requests of the routes that pause the server. A lease of another queue stands for a job that runs."""
    query, running = "?mode=wait", RqKeys.registry("wip", "paused")
    redis.sadd(RqKeys.queues, RqKeys.queue("paused"))
    redis.zadd(running, {"a:1": 1e11})
    pausing = asyncio.create_task(call("POST", "/pause", query=query))
    while not redis.exists(Keys.paused):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    assert await call("POST", "/resume") == {"status": "resumed"}
    await pausing  # 409
    redis.srem(RqKeys.queues, RqKeys.queue("paused"))
    redis.delete(running)
    redis.delete(*(RqKeys.registry("wip", name) for name in ("demo", "demo:high", "demo:low")))
    assert await call("POST", "/pause", query=query) == {"status": "paused"}
    assert await call("GET", "/is_paused") == {"is_paused": True}
    await call("POST", "/resume")
    for route in ("/pause", "/resume"):
        await call("POST", route, key=None)
        await call("POST", route, key=key)  # 403
        await call("POST", route, query="?unknown=1")
    await call("GET", "/is_paused", key=None)
    await call("GET", "/is_paused", query="?unknown=1")


async def call_message_batches(call: Callable[..., Awaitable[Any]]) -> None:
    """Send the requests of the routes of batches of messages, with and without a key."""
    path, one = "/v1/messages/batches", "/v1/messages/batches/{id}"
    params = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    body = {"requests": [{"custom_id": "a", "params": params}]}
    made = (await call("POST", path, json=body))["id"]
    await call("GET", path)
    await call("GET", one, made)
    await call("GET", one + "/results", made)  # 409
    await call("DELETE", one, made)  # 409
    await call("POST", one + "/cancel", made)
    async with asyncio.timeout(60):
        while (await call("GET", one, made))["processing_status"] != "ended":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await call("POST", one + "/cancel", made)  # 409
    await call("GET", one + "/results", made)
    with pytest.MonkeyPatch.context() as patch, large_replies.held_results("alice") as held:
        patch.setattr(held_bytes, "FREE_BYTES", -1)
        held.add(10**9)
        await call("GET", path)
        await call("GET", one + "/results", made)
    await call("DELETE", one, made)
    unserved = {"requests": [{"custom_id": "a", "params": params | {"model": "none"}}]}
    await call("POST", path, json=unserved)
    await call("POST", path, json={"requests": []})
    await call("POST", path, content=b"", headers={"Content-Type": "text/plain"})
    await call("POST", path, content=b" " * 6000, headers={"Content-Type": "application/json"})
    await call("GET", path, query="?limit=0")
    for method, route in [("POST", path), ("GET", path), ("GET", one), ("DELETE", one), ("POST", one + "/cancel"),
                          ("GET", one + "/results")]:  # fmt: skip
        await call(method, route, key=None, json=body if (method, route) == ("POST", path) else None)
        await call(method, route)
        await call(method, route, query="?unknown=1")


async def call_responses(call: Callable[..., Awaitable[Any]]) -> None:
    """Send the requests of the routes of responses that are kept."""
    one = "/v1/responses/{id}"
    body = {"model": "demo", "input": "a", "background": True}
    made = (await call("POST", "/v1/responses", json=body))["id"]
    await call("GET", one, made)
    await call("GET", one + "/input_items", made)
    await call("DELETE", one, made)  # 409
    await call("POST", one + "/cancel", made)
    with pytest.MonkeyPatch.context() as patch, large_replies.held_results("alice") as held:
        patch.setattr(held_bytes, "FREE_BYTES", -1)
        held.add(10**9)
        for method, route in (
            ("GET", one),
            ("GET", one + "/input_items"),
            ("POST", one + "/cancel"),
            ("DELETE", one),
        ):
            await call(method, route, made)
    await call("DELETE", one, made)
    for method, route in (("GET", one), ("GET", one + "/input_items"), ("POST", one + "/cancel"), ("DELETE", one)):
        await call(method, route)
        await call(method, route, key=None)
        await call(method, route, query="?unknown=1")


# Bodies for a classifier of one label, with the results of their jobs.
REWARDED = replace(
    CLASSIFIED,
    labels=["good"],
    classifications=[
        wire.Classification(label="good", logits=wire.Floats([1.5]), probs=wire.Floats([0.8]), num_tokens=3)
    ],
)
OF_CLASSIFIERS: dict[str, tuple[dict[str, Any], wire.Result]] = {
    "/classify": ({"model": "rm", "input": "a"}, REWARDED),
    "/score": ({"model": "rm", "text_1": "a", "text_2": ["b"]}, REWARDED),
    "/rerank": ({"model": "rm", "query": "a", "documents": ["b"]}, REWARDED),
    "/get_reward": ({"model": "rm", "query": ["a"]}, REWARDED),
}


EMBEDDED = replace(RESULT, sequences=[], embeddings=[wire.Embedding(values=wire.Floats([0.6, 0.8]), num_tokens=1)])
OF_EMBEDDERS: dict[str, tuple[dict[str, Any], wire.Result]] = {
    "/v1/embeddings": ({"model": "em", "input": "a"}, EMBEDDED),
}


async def call_synchronous(
    call: Any, routes: dict[str, tuple[dict[str, Any], wire.Result]], worker: FakeWorker
) -> None:
    """Ask routes that answer with a job's result in every way, except beside a full queue."""
    for route, (body, result) in routes.items():
        await call("POST", route, json=body, key=None)
        await call("POST", route, json=body | {"unknown": 1})
        await call("POST", route, json=body | {"model": "none"})
        await call("POST", route, content=b"", headers={"Content-Type": "text/plain"})
        await call("POST", route, content=b" " * 6000, headers={"Content-Type": "application/json"})
        for end in (lambda id_, result=result: worker.end(id_, result), worker.cancel):
            before = worker.waiting()
            calling = asyncio.create_task(call("POST", route, json=body))
            while not calling.done():  # a route may encode texts first, as another job
                for id_ in worker.waiting() - before:
                    end(id_)
                await asyncio.sleep(0.01)
            await calling


@pytest.mark.anyio
async def test_every_reply_is_declared_and_every_declared_reply_occurs(
    serving: Serving, worker: FakeWorker, redis: Redis, document: dict[str, Any]
):
    """Send a request for every status that a route declares, except 500 and 503, and validate the reply."""
    absent, none = "0" * 32, {"Accept": "text/html"}
    seen: set[tuple[str, str, int]] = set()
    settings = {
        "api_keys": KEYS,
        "high_priority_keys": "alice",
        "operator_keys": "alice",
        "max_queue_depth": 6,
        "max_body_bytes": 5000,
        "max_file_bytes": 5000,
    }
    async with serving(**settings) as http:

        async def call(method: str, route: str, id_: str = absent, *, key: str | None = ALICE, **request: Any) -> Any:
            query = request.pop("query", "")
            request["headers"] = (bearer(key) if key else {}) | request.get("headers", {})
            reply = await http.request(method, route.replace("{id}", id_) + query, **request)
            declared = document["paths"][route][method.lower()]["responses"]
            assert str(reply.status_code) in declared, (method, route, reply.status_code, reply.text)
            if reply.headers.get("content-type") == "application/json":
                schema = declared[str(reply.status_code)]["content"]["application/json"]["schema"]
                validator(document, schema).validate(reply.json())
            for name in declared[str(reply.status_code)].get("headers", {}):
                assert name in reply.headers
            seen.add((method.lower(), route, reply.status_code))
            return reply.json() if reply.content and reply.headers["content-type"] == "application/json" else None

        assert (await http.get("/openapi.json")).json() == document
        while (await http.get("/readyz")).status_code != 200:
            pass
        for path in ("/healthz", "/metrics", "/readyz", "/health"):
            await call("GET", path)
        queued = (await call("POST", "/v1/jobs", json=score()))["id"]
        await call("POST", "/v1/jobs", key=BOB, json=score(priority="high"))
        await call("POST", "/v1/jobs/bulk", key=BOB, json=[score(priority="high")])
        ended = (await call("POST", "/v1/jobs", json=score()))["id"]
        running = (await call("POST", "/v1/jobs", json=score()))["id"]
        worker.end(ended)
        worker.start(running, lease_s=60)
        await call("POST", "/v1/jobs/{id}/cancel", running)
        await call("POST", "/v1/jobs/{id}/cancel", ended)
        await call("POST", "/v1/jobs/{id}/cancel", queued)
        with pytest.MonkeyPatch.context() as patch, large_replies.held_results("alice") as held:
            patch.setattr(held_bytes, "FREE_BYTES", -1)
            held.add(10**9)
            await call("GET", "/v1/jobs/{id}", ended)
            await call("GET", "/v1/jobs/ended", query=f"?ids={ended}")
            await call("POST", "/v1/jobs/{id}/cancel", queued)
        await call("DELETE", "/v1/jobs/{id}", running)
        await call("DELETE", "/v1/jobs/{id}", queued)
        await call("GET", "/v1/jobs/{id}/events", ended)
        await call("GET", "/v1/jobs/{id}/events", ended, headers={"Last-Event-ID": "x"})
        await call("GET", "/v1/jobs/{id}/events", key=None)
        await call("GET", "/v1/jobs/{id}/events")
        for id_ in (ended, running):
            await call("GET", "/v1/jobs/{id}", id_)
        for id_ in (ended, running, "0" * 32):
            await call("GET", "/v1/jobs/ended", query=f"?ids={id_}")
        for method, route in [
            ("GET", "/v1/jobs/{id}"), ("DELETE", "/v1/jobs/{id}"), ("POST", "/v1/jobs/{id}/cancel"),
            ("GET", "/v1/jobs"), ("GET", "/v1/models"), ("POST", "/v1/jobs"), ("POST", "/v1/jobs/bulk"),
            ("GET", "/v1/jobs/ended"), ("GET", "/v1/models/{id}"), ("GET", "/tokenizer_info"), *WEBHOOK_ROUTES,
        ]:  # fmt: skip
            await call(method, route, key=None)
            await call(method, route, query="?unknown=1")
            if "{id}" in route or method == "GET":
                await call(method, route, json={} if method == "PATCH" else None)
            if method != "DELETE":
                await call(method, route, headers=none)
        await call_webhooks(call, worker)
        await call_batches(call)
        await call_message_batches(call)
        await call_responses(call)
        await call_weights(call, redis, key=BOB)
        await call_vllm_server(call, redis, key=BOB)
        await call_pause(call, redis, key=BOB)
        await call_adapters(call, redis, worker, key=BOB)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scorepool.api.http.bodies, "BODY_GRACE_S", 0.05)
            for path, methods in document["paths"].items():
                for method in methods.keys() & {"post", "patch"}:
                    if "408" in methods[method]["responses"]:
                        is_form = path == "/v1/files"
                        kind = "multipart/form-data; boundary=b" if is_form else "application/json"
                        content = slow_form() if is_form else trickle()
                        await call(method, path, content=content, headers={"Content-Type": kind})
            patch.setattr(scorepool.api.repositories.files, "MAX_UPLOADS_OF_OWNER", 0)
            await call("POST", "/v1/files", files={"file": ("a", b"")}, data={"purpose": "batch"})
            params = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
            await call("POST", "/v1/messages/batches", json={"requests": [{"custom_id": "a", "params": params}]})  # 429
        for route, wrap in (("/v1/jobs", lambda one: one), ("/v1/jobs/bulk", lambda one: [one])):
            key = {"Idempotency-Key": "k"}
            await call("POST", route, json=wrap(score()), headers=key)
            await call("POST", route, json=wrap(score(rank=True)), headers=key)
            await call("POST", route, json=wrap(score(model="none")))
            await call("POST", route, content=b"", headers={"Content-Type": "text/plain"})
            await call("POST", route, content=b" " * 6000, headers={"Content-Type": "application/json"})
        replay = await http.post("/v1/jobs", json=score(), headers=bearer(ALICE) | {"Idempotency-Key": "k"})
        worker.end(replay.json()["id"])
        await call("POST", "/v1/jobs", json=score(), headers={"Idempotency-Key": "k", "Prefer": "wait=5"})
        await call("GET", "/v1/models/{id}", "demo")
        await call("GET", "/tokenizer_info", query="?model=none")
        synchronous = {
            "/v1/completions": ({"model": "demo", "prompt": "a"}, COMPLETED),
            "/v1/chat/completions": ({"model": "demo", "messages": [{"role": "user", "content": "a"}]}, COMPLETED),
            "/v1/responses": ({"model": "demo", "input": "a"}, COMPLETED),
            "/v1/responses/input_tokens": ({"model": "demo", "input": "a"}, RESULT),
            "/v1/messages": (
                {"model": "demo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
                COMPLETED,
            ),
            "/v1/messages/count_tokens": (
                {"model": "demo", "messages": [{"role": "user", "content": "a"}]},
                RESULT,
            ),
            "/v1/chat/completions/render": ({"model": "demo", "messages": [{"role": "user", "content": "a"}]}, RESULT),
            "/inference/v1/generate": ({"token_ids": [1], "sampling_params": {"max_tokens": 1}}, COMPLETED),
            "/tokenize": ({"model": "demo", "prompt": "a"}, RESULT),
            "/detokenize": ({"model": "demo", "tokens": [1]}, RESULT),
            "/generate": ({"text": "a"}, COMPLETED),
            "/generate_stream": ({"inputs": "a"}, COMPLETED),
            "/": ({"inputs": "a"}, COMPLETED),
            "/infer/": (
                {"model": "demo", "infer_requests": [{"messages": [{"role": "user", "content": "a"}]}]},
                COMPLETED,
            ),
            "/v1/score": ({"model": "demo", "query": [1], "items": [[1]], "label_token_ids": [2]}, RESULT),
            "/get_sequence_logprobs/": ({"sequences": [[1, 2]], "prompt_lengths": [0]}, RESULT),
        }
        await call_synchronous(call, synchronous, worker)
        await call("POST", "/v1/jobs/bulk", json=[score()] * 5)
        await call("POST", "/v1/jobs/bulk", json=[score(priority="high")] * 6)
        for route, body in (("/v1/jobs", score()), ("/v1/jobs/bulk", [score()])):
            await call("POST", route, json=body)
        for route, (body, _) in synchronous.items():
            await call("POST", route, json=body)
        other = FakeWorker(redis, model="rm", name="w2")
        other.register(classifier=wire.Classifier(labels=["good"], activation="sigmoid"))
        classify = {"type": "classify", "model": "rm", "items": [{"prompt": "a"}]}
        await call_synchronous(call, OF_CLASSIFIERS, other)
        embedder = FakeWorker(redis, model="em", name="w3")
        embedder.register(pooling="last")
        await call_synchronous(call, OF_EMBEDDERS, embedder)
        await call("POST", "/v1/jobs/bulk", json=[classify] * 6)
        for route, (body, _) in OF_CLASSIFIERS.items():
            await call("POST", route, json=body)
        await call("POST", "/v1/jobs/bulk", json=[{"type": "embed", "model": "em", "items": [{"prompt": "a"}]}] * 6)
        for route, (body, _) in OF_EMBEDDERS.items():
            await call("POST", route, json=body)

    async with serving() as http:
        for method in ("get", "post"):  # a server without keys
            seen.add((method, "/v1/webhooks/secret", (await http.request(method, "/v1/webhooks/secret")).status_code))

    declared_statuses = {
        (method, route, int(status))
        for route, methods in document["paths"].items()
        for method, operation in methods.items()
        for status in operation["responses"]
        if int(status) < 500
    }
    assert declared_statuses - seen == set()


def examples(document: dict[str, Any]) -> dict[str, Any]:
    """Return the body that /docs shows for each route that has one."""
    bodies = {path: methods.get("post", {}).get("requestBody", {}) for path, methods in document["paths"].items()}
    of_json = {path: body.get("content", {}).get("application/json", {}) for path, body in bodies.items()}
    return {path: content["example"] for path, content in of_json.items() if "example" in content}


@pytest.mark.anyio
async def test_the_body_to_try_of_each_route_is_accepted(
    document: dict[str, Any], serving: Serving, worker: FakeWorker
):
    tried = examples(document)
    endpoints = {endpoint.path: endpoint for dialect in DIALECTS for endpoint in dialect.endpoints}
    of_weights = {WEIGHTS, *FOREIGN_WEIGHTS, LOAD, UNLOAD, "/reset_prefix_cache"}
    assert tried.keys() == {"/v1/jobs", "/v1/jobs/bulk", "/v1/messages/batches", *of_weights, *endpoints}
    for route, endpoint in endpoints.items():
        endpoint.parse(json.dumps(tried[route]).encode())
    async with serving() as http:
        for route, status in (("/v1/jobs", 202), ("/v1/jobs/bulk", 202), ("/v1/messages/batches", 200)):
            assert (await http.post(route, json=tried[route])).status_code == status
