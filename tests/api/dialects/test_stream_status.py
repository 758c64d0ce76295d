"""The status of a stream of several prompts waits until each has begun, so that a refused one has its own status."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseErrorEvent
from pydantic import TypeAdapter
from rq.job import JobStatus

from scorepool import wire
from scorepool.api.routes import dialects
from tests.api.conftest import Serving, eventually
from tests.api.fake_worker import PROVENANCE, FakeWorker

pytestmark = pytest.mark.anyio
REFUSED = wire.Failure(code="too_long", message="72 tokens, the context has 64")


def completed(*token_ids: int) -> wire.Result:
    sequence = wire.SequenceResult(
        token_ids=[*token_ids], token_bytes=[b"a"] * len(token_ids), text="a" * len(token_ids), finish_reason="stop"
    )
    usage = wire.Usage(prompt_tokens=1, completion_tokens=len(token_ids))
    return wire.Result(sequences=[sequence], temperature=1.0, usage=usage, stamp=PROVENANCE)


@asynccontextmanager
async def streaming(
    serving: Serving, worker: FakeWorker
) -> AsyncIterator[tuple[asyncio.Task[httpx.Response], list[str]]]:
    """Stream the completions of two prompts; give the reply to come, and the ids of their jobs."""
    async with serving() as http:
        body = {"model": "demo", "prompt": ["first", "second"], "stream": True}
        reply = asyncio.create_task(http.post("/v1/completions", json=body))
        await eventually(lambda: len(worker.waiting()) == 2)
        yield reply, [job_id.decode() for job_id in worker.redis.lrange("rq:queue:demo", 0, -1)]


async def test_a_later_prompt_that_the_worker_refuses_gives_the_request_its_status(
    serving: Serving, worker: FakeWorker
):
    async with streaming(serving, worker) as (replying, (first, second)):
        worker.stream(first, 0, 5, 6)
        worker.end(first, completed(5, 6))
        await asyncio.sleep(0.2)
        worker.end(second, REFUSED, JobStatus.FAILED)
        reply = await replying

    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt[1]")


async def test_no_token_is_lost_while_the_status_waits(serving: Serving, worker: FakeWorker):
    async with streaming(serving, worker) as (replying, (first, second)):
        worker.stream(first, 0, 5)
        worker.stream(first, 1, 6)
        worker.end(first, completed(5, 6))
        await asyncio.sleep(0.2)
        worker.stream(second, 0, 7)
        worker.end(second, completed(7))
        reply = await replying

    assert reply.status_code == 200
    assert "".join(re.findall('"text":"(a*)"', reply.text)) == "aaa"  # tokens that came together are one event
    assert reply.text.count('"finish_reason":"stop"') == 2
    assert reply.text.endswith("data: [DONE]\n\n")


async def test_an_error_in_a_stream_of_a_response_is_an_event_as_openai_documents_it(
    serving: Serving, worker: FakeWorker
):
    async with serving() as http:
        replying = asyncio.create_task(http.post("/v1/responses", json={"model": "demo", "input": "a", "stream": True}))
        await eventually(worker.waiting)
        [job_id] = worker.waiting()
        worker.stream(job_id, 0, 5)
        await asyncio.sleep(0.2)
        worker.end(job_id, wire.Failure(code="crashed", message="the worker died"), JobStatus.FAILED)
        reply = await replying

    *before, (name, data) = [event.split("\n") for event in reply.text.split("\n\n") if event]
    found = TypeAdapter(ResponseErrorEvent).validate_json(data.removeprefix("data: "), strict=True)
    assert (name, found.sequence_number) == ("event: error", len(before))
    nested = found.model_extra["error"] if found.model_extra else {}  # as the AI SDK reads it
    assert (nested["message"], nested["type"]) == (found.message, "server_error")
    assert "the worker died" in found.message


async def test_no_more_tokens_than_the_limit_are_held(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    """The prompts of a large request begin one after the other, and their stream does not wait for the last."""
    first_events, has_begun = dialects._first_events, asyncio.Event()

    async def note(*args: Any) -> Any:
        held = await first_events(*args)
        has_begun.set()
        return held

    monkeypatch.setattr(dialects, "MAX_HELD_TOKENS", 2)
    monkeypatch.setattr(dialects, "_first_events", note)
    async with streaming(serving, worker) as (replying, (first, second)):
        worker.stream(first, 0, 5)
        worker.stream(first, 1, 6)
        await asyncio.wait_for(has_begun.wait(), 60)
        worker.end(second, REFUSED, JobStatus.FAILED)
        reply = await replying

    assert (reply.status_code, reply.text.count('"text":"a"')) == (200, 2)
    assert '"param":"prompt[1]"' in reply.text.splitlines()[-2]
