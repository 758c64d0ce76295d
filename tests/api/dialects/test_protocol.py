"""A new dialect is an Endpoint and one entry in DIALECTS: its route, errors, stream and OpenAPI entry follow."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec import Struct

import scorepool.api.app
from scorepool import wire
from scorepool.api.app import DIALECTS, create_app
from scorepool.api.dialects.deltas import Diverged
from scorepool.api.dialects.protocol import Context, Dialect, Endpoint
from scorepool.api.dialects.sglang.endpoints import GENERATE
from scorepool.store import Settings
from tests.api.conftest import Serving, eventually
from tests.api.fake_worker import COMPLETED, FakeWorker

pytestmark = pytest.mark.anyio


class ShoutRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ask for a loud continuation of a text."""

    model: str
    quiet: str
    stream: bool = False
    diverges: bool = False


class ShoutReply(Struct, frozen=True):
    """Continue a text loudly."""

    loud: str


class ShoutWriter:
    def __init__(self, body: ShoutRequest) -> None:
        self._body = body

    def add(self, event: wire.TokenDelta | wire.Job) -> Sequence[object]:
        if self._body.diverges:
            raise Diverged
        assert isinstance(event, wire.Job)
        assert event.result is not None
        return [ShoutReply(loud=event.result.sequences[0].text.upper())]

    def end(self) -> Sequence[object]:
        return [b"data: over\n\n"]


class Shout(Endpoint[ShoutRequest]):
    name = "shout"
    path = "/shout"
    summary = "Shout"
    description = "Continue a text loudly."
    body_type = ShoutRequest
    reply_type = ShoutReply
    chunk_type = ShoutReply
    foreign_fields = {"whisper": False}  # noqa: RUF012 - a ClassVar of Endpoint

    def to_requests(self, body: ShoutRequest, context: Context) -> Sequence[wire.Request]:
        return [wire.Generate(model=body.model, prompt=body.quiet, max_tokens=1, timeout_s=context.timeout_s)]

    def to_reply(self, body: ShoutRequest, results: Sequence[wire.Result], context: Context) -> ShoutReply:
        return ShoutReply(loud=results[0].sequences[0].text.upper())

    def is_streamed(self, body: ShoutRequest) -> bool:
        return body.stream

    def to_events(self, body: ShoutRequest, job_ids: Sequence[str], context: Context) -> ShoutWriter:
        return ShoutWriter(body)

    def field_name(self, body: ShoutRequest, field: str) -> str:
        return field.replace("prompt", "quiet")


@pytest.fixture(autouse=True)
def dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    shout = Dialect(tag="shout", endpoints=(Shout(),), error_codes={"model_not_served": "nobody_home"})
    monkeypatch.setattr(scorepool.api.app, "DIALECTS", (*DIALECTS, shout))


async def post(serving: Serving, worker: FakeWorker, outcome: wire.Outcome | None = COMPLETED, **body: Any) -> Any:
    async with serving() as http:
        asking = asyncio.create_task(http.post("/shout", json={"model": "demo", "quiet": "a"} | body))
        if outcome is not None:
            await eventually(worker.waiting)
            [job_id] = worker.waiting()
            worker.end(job_id, outcome)
        return await asking


async def test_a_body_becomes_jobs_and_their_results_a_reply(serving: Serving, worker: FakeWorker):
    reply = await post(serving, worker, whisper=False)

    assert (reply.status_code, reply.json()) == (200, {"loud": "B"})


async def test_events_become_chunks(serving: Serving, worker: FakeWorker):
    reply = await post(serving, worker, stream=True)

    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text == 'data: {"loud":"B"}\n\ndata: over\n\n'


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_the_worker_has_its_status_and_the_dialects_field(
    serving: Serving, worker: FakeWorker, stream: bool
):
    failure = wire.Failure(code="too_long", message="72 tokens, the context has 64")
    reply = await post(serving, worker, failure, stream=stream)

    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "quiet")
    assert error["message"] == "quiet: 72 tokens, the context has 64"


async def test_an_error_code_has_the_dialects_name(serving: Serving, worker: FakeWorker):
    reply = await post(serving, worker, None, model="other")

    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "nobody_home")


async def test_another_value_of_a_foreign_field_is_refused_by_name(serving: Serving, worker: FakeWorker):
    reply = await post(serving, worker, None, whisper=True)

    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "whisper")


async def test_a_second_run_with_other_tokens_is_an_error_event(serving: Serving, worker: FakeWorker):
    reply = await post(serving, worker, stream=True, diverges=True)

    assert (reply.status_code, reply.text.count("data:")) == (200, 1)
    assert "the job began again" in reply.text


async def test_the_route_is_in_the_openapi_document():
    operation = create_app(Settings()).openapi()["paths"]["/shout"]["post"]

    assert (operation["tags"], operation["operationId"]) == (["shout"], "shout_shout_post")
    assert set(operation["responses"]["200"]["content"]) >= {"application/json", "text/event-stream"}


async def test_an_application_without_it_does_not_describe_it(monkeypatch: pytest.MonkeyPatch):
    assert "ShoutReply" in create_app(Settings()).openapi()["components"]["schemas"]
    monkeypatch.setattr(scorepool.api.app, "DIALECTS", DIALECTS)

    assert "ShoutReply" not in create_app(Settings()).openapi()["components"]["schemas"]


def unbounded(node: msgspec.inspect.Type, path: str, seen: tuple[type, ...] = ()) -> list[str]:
    """Return the paths of the integers of a type that may be of any size."""
    match node:
        case msgspec.inspect.IntType():
            return [path] if node.le is None and node.lt is None else []
        case msgspec.inspect.UnionType():
            return [found for each in node.types for found in unbounded(each, path, seen)]
        case msgspec.inspect.ListType():
            return unbounded(node.item_type, f"{path}[]", seen)
        case msgspec.inspect.DictType():
            return unbounded(node.value_type, f"{path}{{}}", seen)
        case msgspec.inspect.Metadata():
            return unbounded(node.type, path, seen)
        case msgspec.inspect.StructType() if node.cls not in seen:
            seen = (*seen, node.cls)
            return [found for each in node.fields for found in unbounded(each.type, f"{path}.{each.name}", seen)]
        case _:
            return []


def test_no_number_of_a_body_is_too_large_for_redis():
    """An integer of more than 64 bits passes JSON, but not msgpack: the request would end with 500."""
    endpoints = [endpoint for dialect in DIALECTS for endpoint in dialect.endpoints if hasattr(endpoint, "body_type")]
    bodies = {endpoint.path: endpoint.body_type for endpoint in (*endpoints, GENERATE)}

    found = {path: unbounded(msgspec.inspect.type_info(body), "") for path, body in bodies.items()}

    assert len(found) > 15
    assert {path: numbers for path, numbers in found.items() if numbers} == {}
