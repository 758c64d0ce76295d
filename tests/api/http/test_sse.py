"""A stream that fails ends with an error event that says why."""

import json
from collections.abc import AsyncGenerator

import httpx
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from scorepool.api.http.sse import EventStream

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (RedisConnectionError("gone"), "unavailable", "the queue does not answer"),
        (ZeroDivisionError("of ours"), "internal", "a fault of the server"),
    ],
)
async def test_an_error_is_the_last_event_of_a_stream(error: Exception, code: str, says: str):
    async def messages() -> AsyncGenerator[bytes | None]:
        yield b"data: {}\n\n"
        raise error

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(Request(scope, receive), messages(), last=b"data: [DONE]\n\n")(scope, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        first, last = (await http.get("/events")).text.strip().split("\n\n")

    assert first == "data: {}"
    error_body = json.loads(last.removeprefix("data: "))["error"]
    assert error_body["code"] == code
    assert error_body["message"].startswith(says)
    assert "gone" not in last
