"""What takes little memory in Redis, or belongs to all, fills no memory when many connections read it."""

import asyncio
import logging
import random
import zlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from starlette.requests import Request
from starlette.types import Message, Scope

from scorepool import store, wire
from scorepool.api.http import file_reply, large_replies
from scorepool.api.http.errors import TooManyResults
from scorepool.api.http.file_reply import FileReply
from scorepool.api.http.large_replies import PIECE_BYTES, held_results
from scorepool.api.repositories.files import decompressed
from scorepool.api.repositories.waiting import Waiting
from scorepool.worker.inference import token_publisher
from scorepool.worker.inference.token_publisher import TokenPublisher
from tests.api.conftest import ALICE, KEYS, Serving, bearer, generate
from tests.api.fake_worker import FakeWorker
from tests.worker.inference.test_token_publisher import Running, entries

pytestmark = pytest.mark.anyio
LINE = b'{"custom_id": "a", "x": "' + b"0" * 4 * 2**20 + b'"}\n'  # 4 kB in Redis


async def upload(http: Any, content: bytes, name: str = "a.jsonl") -> str:
    files = {"file": (name, content)}
    reply = await http.post("/v1/files", files=files, data={"purpose": "batch"}, headers=bearer(ALICE))
    return reply.json()["id"]


@pytest.mark.parametrize("chunk", [b"", b"ab", LINE, bytes(range(256)) * 5000, LINE[: 2 * PIECE_BYTES]])
@pytest.mark.parametrize("level", [0, 1])
def test_a_chunk_is_decompressed_in_pieces(chunk: bytes, level: int):
    pieces = list(decompressed(zlib.compress(chunk, level)))
    assert b"".join(pieces) == chunk
    assert all(0 < len(piece) <= PIECE_BYTES for piece in pieces)


def test_a_chunk_that_is_cut_off_is_an_error():
    with pytest.raises(zlib.error):
        list(decompressed(zlib.compress(b"abcdef")[:-3]))


async def test_a_file_of_long_lines_is_sent_in_pieces(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    sent: list[int] = []

    async def send_body(send: Any, body: bytes) -> None:
        sent.append(len(body))
        await large_replies.send_body(send, body)

    monkeypatch.setattr(file_reply, "send_body", send_body)
    async with serving(api_keys=KEYS) as http:
        file_id = await upload(http, LINE * 2)
        reply = await http.get(f"/v1/files/{file_id}/content", headers=bearer(ALICE))
    assert reply.content == LINE * 2
    assert max(sent) <= PIECE_BYTES


async def test_the_chunks_of_downloads_are_counted_by_owner(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(large_replies, "MAX_BYTES_OF_OWNER", 200_000)
    async with serving(api_keys=KEYS) as http:
        file_id = await upload(http, random.Random(0).randbytes(400_000))
        path = f"/v1/files/{file_id}/content"
        with held_results("alice") as held:
            held.add(150_000)
            assert (await http.get(path, headers=bearer(ALICE))).status_code == 429
        reply = await http.get(path, headers=bearer(ALICE))
    assert len(reply.content) == 400_000
    assert not large_replies._held.by_owner


async def test_lists_of_files_are_counted_by_owner(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    """Names make a list large. Its reader may take it slowly."""
    monkeypatch.setattr(large_replies, "MAX_BYTES_OF_OWNER", 200_000)
    async with serving(api_keys=KEYS) as http:
        for _ in range(80):
            await upload(http, b"{}", name="a" * 3900)
        with held_results("alice") as held:
            held.add(100_000)
            assert (await http.get("/v1/files", headers=bearer(ALICE))).status_code == 429
            assert len((await http.get("/v1/files?limit=10", headers=bearer(ALICE))).json()["data"]) == 10
        sent = len((await http.get("/v1/files", headers=bearer(ALICE))).json()["data"])
    assert sent == 80
    assert not large_replies._held.by_owner


@pytest.mark.parametrize("error", [None, TooManyResults("too many"), RedisConnectionError("gone")])
async def test_a_file_that_ends_early_is_cut_off_without_a_traceback(
    error: Exception | None, caplog: pytest.LogCaptureFixture
):
    """The server closes the connection of a reply without an end."""
    sent: list[Message] = []

    async def pieces() -> AsyncGenerator[bytes]:
        yield b"ab"
        if error is not None:
            raise error

    async def receive() -> Message:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "state": {"request_id": "r"}}
    with caplog.at_level(logging.WARNING):
        await FileReply(Request(scope, receive), b"", pieces(), 3, {})(scope, receive, send)
    assert [message.get("body") for message in sent] == [None, b"ab"]
    assert (b"content-length", b"3") in sent[0]["headers"]
    assert not any(record.exc_info for record in caplog.records)


async def test_streams_of_events_read_the_tokens_of_all_jobs_page_by_page(
    serving: Serving, worker: FakeWorker, redis: Redis, monkeypatch: pytest.MonkeyPatch
):
    """Many connections wait for their turn; each finds its own tokens behind those of others."""
    others = wire.encode(
        [wire.TokenDelta(id="b" * 32, run=1, sequence=0, first=0, token_ids=[1] * 50_000, token_bytes=[])]
    )
    num_reading, most_reading, most_bytes = 0, 0, 0
    async with serving(api_keys=KEYS) as http:
        waiting: Waiting = http._transport.app.state.scorepool.waiting  # type: ignore[attr-defined]
        commands = waiting._readers[0]._commands
        original = commands.xrange

        async def xrange(*args: Any, **options: Any) -> Any:
            nonlocal num_reading, most_reading, most_bytes
            num_reading += 1
            most_reading = max(most_reading, num_reading)
            found = await original(*args, **options)
            most_bytes = max(most_bytes, sum(len(fields[b"step"]) for _, fields in found))
            num_reading -= 1
            return found

        monkeypatch.setattr(commands, "xrange", xrange)
        job = (await http.post("/v1/jobs", json=generate(stream=True), headers=bearer(ALICE))).json()["id"]
        for _ in range(100):
            redis.xadd(store.TOKENS, {"step": others})
        own = wire.TokenDelta(id=job, run=1, sequence=0, first=0, token_ids=[97], token_bytes=[b"a"])
        redis.xadd(store.TOKENS, {"step": wire.encode([own])})

        async def backfill() -> list[list[int]]:
            return [delta.token_ids async for delta in waiting.backfill("alice", job, 0.0)]

        found = await asyncio.gather(*(backfill() for _ in range(5)))
    assert found == [[[97]]] * 5
    assert most_reading == 1
    assert most_bytes < 2 * 2**20


def test_large_entries_make_the_stream_of_tokens_shorter(redis: Redis, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(token_publisher, "MAX_STREAM_BYTES", 2**20)
    publisher = TokenPublisher(redis)
    try:
        for number in range(5):
            running = Running(publisher, job_id=f"{number}", top_logprobs=128)
            running.generate(1000)
    finally:
        publisher.close()
    sizes = [len(wire.encode(entry)) for entry in entries(redis)]
    assert sum(sizes) < 2 * 2**20  # of 3.2 MB at least
