"""A reply whose result comes frame by frame from the result store."""

from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from scorepool import wire
from scorepool.api.http.errors import Unavailable
from scorepool.api.http.streamed_job import StreamedJob
from scorepool.wire.stored_result import FrameReader, to_frames
from tests.api.fake_worker import RESULT

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("reply_format", ["json", "msgpack"])
async def test_a_reply_is_cut_off_without_an_error_of_the_server_if_the_store_stops_to_answer(
    reply_format: wire.Format,
):
    body = b"".join(to_frames(RESULT, "a"))
    first, *_ = FrameReader("a", len(body)).feed(body)

    async def frames() -> AsyncIterator[bytes]:
        raise Unavailable("the result store does not answer")
        yield b""

    async def run(work: Callable[[], Any], *, is_large: bool) -> Any:
        return work()

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    job = wire.Job(id="j", kind="score", model="demo", status="finished", created_at="2026-11-27T00:00:00+00:00")
    held: Any = SimpleNamespace(run=run)
    reply = StreamedJob(job, 1, first, frames(), held, reply_format, {})
    await reply({"type": "http"}, None, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 200
    assert all(message["more_body"] for message in sent[1:])
