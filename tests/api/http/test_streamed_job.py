"""A reply whose result comes frame by frame from the result store."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from scorepool import wire
from scorepool.api.http.errors import Unavailable
from scorepool.api.http.large_replies import held_results
from scorepool.api.http.streamed_job import StreamedJob
from scorepool.wire.stored_result import FrameReader, to_frames
from tests.api.fake_worker import RESULT

pytestmark = pytest.mark.anyio
JOB = wire.Job(id="j", kind="score", model="demo", status="finished", created_at="2026-11-27T00:00:00+00:00")
SCOPE: dict[str, Any] = {"type": "http"}


def result_frames() -> list[bytes]:
    body = b"".join(to_frames(RESULT, "a"))
    return list(FrameReader("a", len(body)).feed(body))


async def send_all(
    first: bytes, frames: AsyncGenerator[bytes], reply_format: wire.Format, has_left: asyncio.Event
) -> list[Message]:
    """Send the reply to a client that stays until `has_left`. Return what was sent."""
    sent: list[Message] = []

    async def receive() -> Message:
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:  # as uvicorn's, it drops what nobody reads
        sent.append(message)

    with held_results("alice") as held:
        reply = StreamedJob(Request(SCOPE, receive), JOB, 1, first, frames, held, reply_format, {})
        await reply(SCOPE, receive, send)
    return sent


@pytest.mark.parametrize("reply_format", ["json", "msgpack"])
async def test_a_reply_is_cut_off_without_an_error_of_the_server_if_the_store_stops_to_answer(
    reply_format: wire.Format,
):
    async def frames() -> AsyncGenerator[bytes]:
        raise Unavailable("the result store does not answer")
        yield b""

    start, *rest = await send_all(result_frames()[0], frames(), reply_format, asyncio.Event())
    assert start["status"] == 200
    assert all(message["more_body"] for message in rest)


async def test_no_more_of_a_result_is_read_when_its_client_has_left():
    first, frame = result_frames()
    has_left, num_read, is_closed = asyncio.Event(), 0, False

    async def frames() -> AsyncGenerator[bytes]:
        nonlocal num_read, is_closed
        try:
            for num_read in range(1, 1001):
                if num_read == 3:
                    has_left.set()
                await asyncio.sleep(0)
                yield frame
        finally:
            is_closed = True

    sent = await send_all(first, frames(), "json", has_left)
    assert (3 <= num_read < 20, is_closed) == (True, True)
    assert all(message["more_body"] for message in sent[1:])
