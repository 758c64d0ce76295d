"""One tenant reads large results on many connections: the small requests of another are answered meanwhile."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from starlette.types import Message

from scorepool import wire
from scorepool.api.batches import collect, lines
from scorepool.api.batches.lines import LineInProgress
from scorepool.api.http import large_replies
from scorepool.api.http.errors import TooManyResults
from tests.api.conftest import ALICE, BOB, KEYS, Serving, bearer, eventually, score
from tests.api.fake_worker import COMPLETED, RESULT, FakeWorker
from tests.security.second_tenant import second_tenant

pytestmark = pytest.mark.anyio
MB = 10**6


def large_result(num_sequences: int) -> wire.Result:
    """Return a result with some 100 kB of JSON, 30 kB of msgpack, in each sequence."""
    sequence = replace(RESULT.sequences[0], logprobs=wire.Floats([-0.1234567] * 5000))
    return replace(RESULT, sequences=[sequence] * num_sequences)


async def ended_job(http: httpx.AsyncClient, worker: FakeWorker, result: wire.Result, key: str = ALICE) -> str:
    job_id = (await http.post("/v1/jobs", json=score(), headers=bearer(key))).json()["id"]
    worker.end(job_id, result)
    return job_id


async def test_another_name_is_answered_beside_readers_of_a_large_result(serving: Serving, worker: FakeWorker):
    result = large_result(200)
    async with serving(api_keys=KEYS) as http:
        path = f"/v1/jobs/{await ended_job(http, worker, result)}"
        async with second_tenant(http) as progress:
            replies = await asyncio.gather(*(http.get(path, headers=bearer(ALICE)) for _ in range(8)))
    answered = [reply for reply in replies if reply.status_code == 200]
    assert len(answered[0].content) > 15 * MB
    assert {reply.status_code for reply in replies} <= {200, 429}
    for reply in answered:
        assert wire.encode_json(result) in reply.content
        assert int(reply.headers["content-length"]) == len(reply.content)
    assert progress.answered >= 8
    assert progress.longest_turn_s < 0.3
    assert not large_replies._held.by_owner


async def test_results_at_once_are_bounded_by_name_and_in_all(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    """A single result is sent whatever its size, and small ones always."""
    monkeypatch.setattr(large_replies, "MAX_BYTES_OF_OWNER", MB // 10)
    monkeypatch.setattr(large_replies, "MAX_BYTES", MB // 10)
    async with serving(api_keys=KEYS) as http:
        large = f"/v1/jobs/{await ended_job(http, worker, large_result(20))}"
        small = f"/v1/jobs/{await ended_job(http, worker, RESULT)}"
        others = f"/v1/jobs/{await ended_job(http, worker, large_result(10), BOB)}"
        assert (await http.get(large, headers=bearer(ALICE))).status_code == 200
        with large_replies.held_results("alice") as held:
            held.add(MB)
            await refused(http, large, ALICE, "your requests are reading results of more than 100000 bytes at once")
            await refused(http, others, BOB, "this server is sending results of more than 100000 bytes")
            assert (await http.get(small, headers=bearer(ALICE))).status_code == 200
        assert (await http.get(others, headers=bearer(BOB))).status_code == 200


async def refused(http: httpx.AsyncClient, path: str, key: str, sentence: str) -> None:
    for refused_path in (path, f"{path}?wait=5"):
        reply = await http.get(refused_path, headers=bearer(key))
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (429, "too_many_results")
        assert error["message"].startswith(sentence)
        assert int(reply.headers["retry-after"]) > 0


async def test_a_long_poll_holds_nothing(serving: Serving, worker: FakeWorker):
    async with serving(api_keys=KEYS) as http:
        job_id = (await http.post("/v1/jobs", json=score(), headers=bearer(ALICE))).json()["id"]
        waiting = asyncio.create_task(http.get(f"/v1/jobs/{job_id}?wait=30", headers=bearer(ALICE)))
        await asyncio.sleep(0.1)
        assert not large_replies._held.by_owner
        worker.end(job_id, RESULT)
        assert (await waiting).json()["status"] == "finished"


async def test_both_formats_and_the_end_event_are_the_same_to_the_byte(serving: Serving, worker: FakeWorker):
    result = large_result(10)
    async with serving(api_keys=KEYS) as http:
        path = f"/v1/jobs/{await ended_job(http, worker, result)}"
        packed = await http.get(path, headers=bearer(ALICE) | {"Accept": "application/msgpack"})
        text = await http.get(path, headers=bearer(ALICE))
        events = await http.get(f"{path}/events", headers=bearer(ALICE))
    job = wire.parse(packed.content, wire.Job, "msgpack")
    assert job.result == result
    assert packed.content == wire.encode(job)
    assert text.content == wire.encode_json(job)
    assert text.headers["content-type"] == "application/json"
    assert text.headers["vary"] == "Accept"
    assert events.content.endswith(b"\ndata: " + text.content + b"\n\n")
    assert not large_replies._held.by_owner


async def test_a_client_that_reads_a_large_reply_slowly_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(large_replies, "READ_GRACE_S", 0.05)
    monkeypatch.setattr(large_replies, "READ_BYTES_PER_S", 100 * MB)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        if len(sent) > 5:
            await asyncio.Event().wait()
        sent.append(message)

    with large_replies.held_results("alice") as held:
        response = await held.reply(lambda: b"x" * 4 * MB, "json")
        assert held._held.num_bytes == len(response.body)
        async with asyncio.timeout(30):
            await response({"type": "http"}, nothing, send)
    assert 0 < sum(len(message.get("body", b"")) for message in sent) < 3 * MB
    assert sent[-1]["more_body"]


async def nothing() -> Any:
    await asyncio.Event().wait()


def test_a_refused_result_is_not_counted():
    with large_replies.held_results("alice") as one, large_replies.held_results("alice") as other:
        one.add(10**9)
        with pytest.raises(TooManyResults):
            other.add(MB)
        assert large_replies._held.by_owner == {"alice": 10**9}
    assert not large_replies._held.by_owner


async def test_a_large_synchronous_reply_is_built_in_turns(serving: Serving, worker: FakeWorker):
    """It waits for the thread like any other, and what it holds is given back."""
    result = replace(COMPLETED, sequences=large_result(20).sequences)
    async with serving() as http:
        body = {"model": "demo", "prompt": "a"}
        async with large_replies._turns.turn("bob"):
            asking = asyncio.create_task(http.post("/v1/completions", json=body))
            await eventually(worker.waiting)
            worker.end(worker.waiting().pop(), result)
            await eventually(lambda: large_replies._held.by_owner)
            await eventually(lambda: large_replies._turns._waiting)
            assert not asking.done()
        assert (await asking).status_code == 200
    assert not large_replies._held.by_owner


def test_large_results_of_a_batch_are_collected_one_by_one():
    ended = [LineInProgress(number, 1) for number in range(40)]
    large = collect.GROUP_BYTES
    assert [len(group) for group in collect._groups(ended, [100] * 40)] == [16, 16, 8]
    assert [len(group) for group in collect._groups(ended[:5], [1, large, 2 * large, 1, 1])] == [1, 1, 1, 2]
    assert list(collect._groups([], [])) == []


async def test_a_large_line_of_a_batch_is_encoded_in_a_thread(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    threads: set[str] = set()
    ended_line = lines.ended_line

    def in_thread(*arguments: Any) -> lines.EndedLine:
        threads.add(threading.current_thread().name)
        return ended_line(*arguments)

    monkeypatch.setattr(lines, "ended_line", in_thread)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "demo", "prompt": "a"}}
    async with serving() as http:
        files = {"file": ("a.jsonl", json.dumps(line).encode())}
        file_id = (await http.post("/v1/files", files=files, data={"purpose": "batch"})).json()["id"]
        frame = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": file_id}
        path = f"/v1/batches/{(await http.post('/v1/batches', json=frame)).json()['id']}"
        await eventually(worker.waiting)
        worker.end(worker.waiting().pop(), replace(COMPLETED, sequences=large_result(20).sequences))
        async with asyncio.timeout(60):
            while (batch := (await http.get(path)).json())["status"] != "completed":  # noqa: ASYNC110 - Redis changes
                await asyncio.sleep(0.02)
    assert batch["request_counts"]["completed"] == 1
    assert {name.rpartition("_")[0] for name in threads} == {"reply"}
