"""Streams ask for tokens that they miss, and drop those that come late."""

import asyncio
import json
import time
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from scorepool import store, wire
from scorepool.api import streaming
from scorepool.api.http import sse, unsent_events
from scorepool.api.repositories.waiting import Waiting
from tests.api.conftest import Serving, eventually, generate
from tests.api.fake_worker import COMPLETED, FakeWorker

pytestmark = pytest.mark.anyio
ROUTES = ["events", "completions"]


class Stream:
    """A request for a stream, and its job, which the test runs."""

    def __init__(self, http: httpx.AsyncClient, worker: FakeWorker, route: str) -> None:
        self._http, self._worker, self._route = http, worker, route
        self._job_id = ""

    async def open(self) -> None:
        while (await self._http.get("/readyz")).status_code != 200:
            pass
        if self._route == "events":
            self._job_id = (await self._http.post("/v1/jobs", json=generate(stream=True))).json()["id"]
            request = self._http.get(f"/v1/jobs/{self._job_id}/events")
        else:
            body = {"model": "demo", "prompt": "a", "stream": True}
            request = self._http.post("/v1/completions", json=body)
        self.reply = asyncio.create_task(request)
        state = self._http._transport.app.state.scorepool  # type: ignore[attr-defined]
        self._reader = state.parts[0].reader
        await eventually(lambda: len(state.waiting) and self._worker.waiting())
        (self._job_id,) = self._worker.waiting()
        self._worker.start(self._job_id)

    def write(self, first: int, text: str, run: int = 1) -> None:
        ids = list(text.encode())
        delta = wire.TokenDelta(
            id=self._job_id,
            run=run,
            sequence=0,
            first=first,
            token_ids=ids,
            token_bytes=[bytes([token]) for token in ids],
            logprobs=wire.Floats([-float(first + index) for index in range(len(ids))]),
        )
        self._last_entry: bytes = self._worker.redis.xadd(store.TOKENS, {"step": wire.encode([delta])})

    async def end(self, text: str) -> str:
        """End the job. Return the texts that the client got, one in brackets for each event of tokens.

        The API reads what was written before: tokens that it reads with the end may come in the result's event.
        """
        await eventually(lambda: self._reader._positions[store.TOKENS] == self._last_entry.decode())
        (sequence,) = COMPLETED.sequences
        ids = list(text.encode())
        token_bytes = [bytes([token]) for token in ids]
        logprobs = wire.Floats([-float(index) for index in range(len(ids))])
        sequence = replace(sequence, token_ids=ids, token_bytes=token_bytes, text=text, logprobs=logprobs)
        self._worker.end(self._job_id, replace(COMPLETED, sequences=[sequence]))
        found, count = "", 0
        for line in (await self.reply).text.splitlines():
            name, _, value = line.partition(": ")
            data = json.loads(value) if name == "data" and value != "[DONE]" else {}
            if "token_ids" in data:
                expected = [-float(data["first"] + index) for index in range(len(data["token_ids"]))]
                assert data["first"] == count
                assert data["logprobs"] == expected
                count += len(expected)
                found += f"[{bytes(data['token_ids']).decode()}]"
            elif "choices" in data:
                found += f"[{data['choices'][0]['text']}]"
        return found.replace("[]", "")

    async def missing(self) -> list[tuple[int, int]]:
        """Wait for a request for missing tokens; return and delete it: (sequence, first)."""
        key, redis = store.Keys.missing_tokens, self._worker.redis
        await eventually(lambda: redis.exists(key))
        assert 0 < redis.ttl(key) <= 60
        found = [wire.parse(body, wire.MissingTokens, "msgpack") for body in redis.smembers(key)]
        redis.delete(key)
        assert {each.id for each in found} == {self._job_id}
        return [(each.sequence, each.first) for each in found]


@pytest.mark.parametrize("route", ROUTES)
async def test_a_gap_is_asked_for_and_filled(serving: Serving, worker: FakeWorker, route: str):
    async with serving() as http:
        stream = Stream(http, worker, route)
        await stream.open()
        stream.write(0, "ab")
        stream.write(4, "ef")  # "cd" is lost
        missing = await stream.missing()
        stream.write(6, "g")  # was under way when the worker was asked
        stream.write(2, "cdefg")
        stream.write(0, "abcdefg")  # for another client
        stream.write(7, "h")

        assert await stream.end("abcdefghi") == "[ab][cdefg][h][i]"
    assert missing == [(0, 2)]


@pytest.mark.parametrize("route", ROUTES)
async def test_tokens_that_a_slow_client_does_not_take_are_dropped_and_come_with_the_result(
    serving: Serving, worker: FakeWorker, route: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(unsent_events, "MAX_BYTES", 0)
    async with serving() as http:
        stream = Stream(http, worker, route)
        await stream.open()
        stream.write(0, "ab")
        stream.write(2, "cd")

        assert await stream.end("abcde") == "[abcde]"


async def test_what_clients_do_not_take_is_bounded_by_stream_and_by_owner(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unsent_events, "MAX_BYTES", 300_000)
    monkeypatch.setattr(unsent_events, "MAX_BYTES_OF_OWNER", 500_000)
    with ExitStack() as stack:
        streams = [stack.enter_context(unsent_events.unsent_events(owner)) for owner in ("alice", "alice", "bob")]
        for unsent in streams:
            for number in range(5):
                unsent.put_or_drop(f"{number}", 100_000)
            unsent.put("end")
        found = [[await unsent.get() for _ in range(count)] for unsent, count in zip(streams, (4, 3, 4), strict=True)]
        streams[0].put_or_drop("5", 100_000)
        assert await streams[0].get() == "5"
    assert found == [["0", "1", "2", "end"], ["0", "1", "end"], ["0", "1", "2", "end"]]
    assert not unsent_events._unsent.by_owner


@pytest.mark.parametrize("route", ROUTES)
async def test_a_gap_is_asked_for_again_if_nothing_comes(
    serving: Serving, worker: FakeWorker, route: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(streaming, "ASK_AGAIN_S", 0.2)
    async with serving() as http:
        stream = Stream(http, worker, route)
        await stream.open()
        stream.write(1, "b")
        assert await stream.missing() == [(0, 0)]
        await asyncio.sleep(0.3)
        stream.write(2, "c")
        assert await stream.missing() == [(0, 0)]

        assert await stream.end("abc") == "[abc]"  # the worker is of a release that repeats nothing


@pytest.mark.parametrize("route", ROUTES)
async def test_late_tokens_of_an_earlier_run_are_dropped(serving: Serving, worker: FakeWorker, route: str):
    async with serving() as http:
        stream = Stream(http, worker, route)
        await stream.open()
        stream.write(0, "abc", run=5)
        stream.write(0, "ab", run=9)
        stream.write(3, "XYZ", run=5)  # the first worker has woken
        stream.write(2, "cde", run=9)
        stream.write(6, "XYZ", run=5)

        assert await stream.end("abcdef") == "[abc][de][f]"


@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_that_sends_nothing_is_kept_open(
    serving: Serving, worker: FakeWorker, route: str, monkeypatch: pytest.MonkeyPatch
):
    """A second run computes what was sent, for longer than a proxy keeps a silent connection."""
    for module in (sse, streaming):
        monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.3)
    async with serving() as http:
        stream = Stream(http, worker, route)
        await stream.open()
        began_at = time.monotonic()
        stream.write(0, "abcdefghij")
        for first in range(10):
            stream.write(first, "abcdefghij"[first], run=2)
            await asyncio.sleep(0.1)
        await stream.end("abcdefghijk")

        num_comments = (await stream.reply).text.count(": waiting\n\n")
    assert 2 <= num_comments <= 2 + (time.monotonic() - began_at) / 0.3


@pytest.mark.parametrize("route", ROUTES)
async def test_tokens_of_a_worker_of_the_previous_release_are_streamed(
    serving: Serving, worker: FakeWorker, redis: Redis, route: str
):
    """It names no run, and its deltas begin again at 0 after a takeover."""
    async with serving() as http:
        stream = Stream(http, worker, route)
        await stream.open()
        stream.write(0, "ab", run=0)
        stream.write(0, "a", run=0)
        stream.write(1, "bc", run=0)

        assert await stream.end("abcd") == "[ab][c][d]"
    assert not redis.exists(store.Keys.missing_tokens)


@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_waits_for_a_redis_that_does_not_answer(
    serving: Serving, worker: FakeWorker, route: str, monkeypatch: pytest.MonkeyPatch
):
    failures = iter([RedisConnectionError(), OSError(), RedisTimeoutError()])
    until_ended = Waiting.until_ended

    async def fail_first(*arguments: Any) -> wire.Job:
        for failure in failures:
            raise failure
        return await until_ended(*arguments)

    monkeypatch.setattr(Waiting, "until_ended", fail_first)
    async with serving() as http:
        stream = Stream(http, worker, route)
        await stream.open()
        stream.write(0, "ab")

        assert await stream.end("abc") == "[ab][c]"
