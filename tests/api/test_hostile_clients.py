"""Clients that disconnect, send garbage or are slow leave no traceback in the log. Tested on bare sockets."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from scorepool.api.app import create_app
from scorepool.api.repositories.queue import Queue, Submitted
from scorepool.store import Settings
from tests.api.conftest import SECRET, score
from tests.api.fake_worker import FakeWorker
from tests.api.test_process import eventually, is_ready, running

RESET = b"\x01\0\0\0\0\0\0\0"  # SO_LINGER of 0 s: closing sends a TCP reset
HEAD = b"Host: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
NONSENSE = [
    CHUNKED + b"zz\r\n",
    CHUNKED + b"-1\r\n",
    CHUNKED + b"f" * 30 + b"\r\n",
    CHUNKED + b"5\r\nabcdeXX",
    CHUNKED + b"3;" + b"e" * 200_000,
    CHUNKED + b"0\r\nX: " + b"a" * 100_000,
    HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    HEAD + b"Content-Length: -5\r\n\r\nabcdef",
    HEAD + b"Content-Length: 99999999999999999999999\r\n\r\nabcdef",
    HEAD + b"Content-Length: 100\r\n\r\n{",
    HEAD + b"Content-Length: 2\r\n\r\n{}\x16\x03\x01 nonsense\r\n\r\n",
    HEAD + b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\nx",
]
PATHS = [b"/v1/jobs", b"/v1/files", b"/nowhere"]
GONE = (
    TimeoutError,
    ConnectionResetError,
    BrokenPipeError,
)  # the server closed the connection early


def test_garbage_and_clients_that_disconnect_leave_no_traceback(
    root: Path, redis: Redis, redis_url: str, tmp_path: Path
):
    FakeWorker(redis).register()
    with running(root, redis_url, tmp_path / "log") as (http, _):
        eventually(lambda: is_ready(http))
        for path in PATHS:
            for nonsense in NONSENSE:
                send_and_disconnect(http, b"POST " + path + b" HTTP/1.1\r\n", nonsense)
                send_at_once(http, b"POST " + path + b" HTTP/1.1\r\n" + nonsense)
        assert http.post("/v1/jobs", json=score()).status_code == 202
        both_lengths = {"Content-Length": "2", "Transfer-Encoding": "chunked"}
        assert http.post("/v1/jobs", content=b"{}", headers=both_lengths).status_code == 400  # api/http/protocol.py
    assert "Traceback" not in (tmp_path / "log").read_text()


def send_and_disconnect(http: httpx.Client, line: bytes, rest: bytes) -> None:
    """Send head and body apart, so that a request that its head disqualifies is answered before its body comes."""
    head, _, body = rest.partition(b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", http.base_url.port or 0), timeout=60) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.settimeout(0.02)
        with contextlib.suppress(*GONE):
            for part in (line + head + b"\r\n\r\n", body):
                connection.sendall(part)
                with contextlib.suppress(TimeoutError):  # the server waits for more
                    connection.recv(100_000)


def send_at_once(http: httpx.Client, request: bytes) -> None:
    """Send head and body together, so that uvicorn answers the body while the application answers the head."""
    address = ("127.0.0.1", http.base_url.port or 0)
    with socket.create_connection(address, timeout=60) as connection, contextlib.suppress(*GONE):
        connection.settimeout(0.02)
        connection.sendall(request)
        connection.recv(100_000)


@pytest.mark.anyio
async def test_an_upload_that_a_stopping_server_cancels_is_answered_with_503(redis_url: str):
    """uvicorn cancels requests that take longer than its grace time."""
    app = create_app(Settings(redis_url=redis_url, webhook_secret=SECRET))
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"100")]
    scope = {"type": "http", "method": "POST", "path": "/v1/jobs", "query_string": b"", "headers": headers}
    is_reading, sent = asyncio.Event(), []

    async def receive() -> dict[str, object]:
        is_reading.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    async with app.router.lifespan_context(app):
        answering = asyncio.create_task(app(scope, receive, send))
        await is_reading.wait()
        answering.cancel("timeout graceful shutdown exceeded")
        await answering

    assert [sent[0]["status"], (b"retry-after", b"2") in sent[0]["headers"]] == [503, True]


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_its_job_is_submitted_cancels_it(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch, stream: bool
):
    worker = FakeWorker(redis)
    worker.register()
    body = json.dumps({"model": "demo", "prompt": "a", "stream": stream}).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    messages = iter([{"type": "http.request", "body": body}])
    submit = Queue.submit
    num_submitted = 0

    async def receive() -> dict[str, object]:
        return next(messages, {"type": "http.disconnect"})

    async def send(message: dict[str, object]) -> None:
        pass

    async def submit_slowly(*args: Any, **options: Any) -> list[Submitted]:
        nonlocal num_submitted
        submitted = await submit(*args, **options)
        num_submitted += len(submitted)
        await asyncio.sleep(0.1)  # the client has left before this returns
        return submitted

    monkeypatch.setattr(Queue, "submit", submit_slowly)
    app = create_app(Settings(redis_url=redis_url, webhook_secret=SECRET))
    async with app.router.lifespan_context(app):
        await app(scope, receive, send)

    assert (num_submitted, worker.waiting()) == (1, set())
