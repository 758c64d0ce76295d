"""Batches with a fake worker, so that every moment can be chosen: expiry, full queues, two drivers."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import RedisError
from rq.job import JobStatus

import scorepool.api.repositories.queue
import scorepool.api.server
from scorepool import store, wire
from scorepool.api.batches import advance, collect, driver, lines, start_lines, validate
from scorepool.api.batches.batch_lease import BatchLease, LeaseLost
from scorepool.api.batches.batch_store import BatchStore
from scorepool.api.batches.lines import job_id_of
from scorepool.api.batches.services import BatchServices
from scorepool.api.http.errors import Unavailable
from scorepool.api.repositories import files
from scorepool.api.repositories.batches import BatchProgress
from scorepool.api.repositories.jobs import Jobs
from scorepool.worker import Queue
from scorepool.worker.claims.leases import Claim, Leases
from tests.api.conftest import ALICE, BOB, KEYS, Serving, bearer, eventually
from tests.api.fake_worker import COMPLETED, PROVENANCE, FakeWorker

pytestmark = pytest.mark.anyio
HOUR_S, DAY_S = 3600, 86_400
SHORT_LIVED = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": str(HOUR_S)}
FORM = "multipart/form-data; boundary=b"
FORM_PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'


def jsonl(count: int, **body: Any) -> bytes:
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "demo", "prompt": "a", "max_tokens": 1} | body,
        }
        for number in range(1, count + 1)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def upload(http: httpx.AsyncClient, text: bytes, **options: Any) -> httpx.Response:
    return await http.post("/v1/files", files={"file": ("input.jsonl", text)}, data={"purpose": "batch"}, **options)


async def start(http: httpx.AsyncClient, text: bytes, **changes: Any) -> str:
    file = (await upload(http, text)).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"} | changes
    reply = await http.post("/v1/batches", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["id"]


async def until(http: httpx.AsyncClient, batch_id: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while not condition(batch := (await http.get(f"/v1/batches/{batch_id}")).json()):  # noqa: ASYNC110 - it is in Redis
            await asyncio.sleep(0.02)
    return batch


def has(status: str) -> Callable[[dict[str, Any]], bool]:
    return lambda batch: batch["status"] == status


async def lines_of(http: httpx.AsyncClient, file_id: str) -> dict[str, Any]:
    text = (await http.get(f"/v1/files/{file_id}/content")).text
    found = [json.loads(line) for line in text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


def let_expire(redis: Redis, batch_id: str) -> None:
    key = store.Keys.batch(batch_id)
    before = wire.parse(redis.hget(key, "state"), BatchProgress, "msgpack")
    after = replace(before, batch=replace(before.batch, expires_at=int(time.time()) - 1))
    redis.hset(key, mapping={"state": wire.encode(after)})
    redis.hincrby(key, "turn", 1)  # so that a driver that holds the batch does not overwrite it
    redis.zadd(store.Keys.batches, {batch_id: 0})


async def test_lines_that_are_not_answered_in_the_window_are_expired(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    async with serving() as http:
        batch_id = await start(http, jsonl(5), completion_window="30m")
        await eventually(lambda: len(worker.waiting()) == 5)
        for number in (2, 4):
            worker.end(job_id_of(batch_id, number, 0), COMPLETED)
        running = job_id_of(batch_id, 5, 0)
        worker.start(running, lease_s=60)
        let_expire(redis, batch_id)
        await eventually(lambda: redis.hget(f"rq:job:{running}", "cancel_requested") == b"1")
        worker.cancel(running)
        batch = await until(http, batch_id, has("expired"))
        good, bad = [await lines_of(http, batch[name]) for name in ("output_file_id", "error_file_id")]

    assert batch["expired_at"] is not None
    assert batch["request_counts"] == {"total": 5, "completed": 2, "failed": 3, "expired": 3}
    assert (set(good), set(bad)) == ({"2", "4"}, {"1", "3", "5"})
    assert {one["error"]["code"] for one in bad.values()} == {"batch_expired"}
    assert worker.waiting() == set()


async def test_ended_jobs_of_a_batch_that_ends_wait_for_the_result_store(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    """Only lines whose jobs do not end are given up."""
    monkeypatch.setattr(collect, "CANCEL_TIMEOUT_S", 0.2)
    read = Jobs.read

    async def silent_store(*_: object) -> wire.Job:
        raise Unavailable("the result store does not answer")

    async with serving() as http:
        batch_id = await start(http, jsonl(2))
        await eventually(lambda: len(worker.waiting()) == 2)
        monkeypatch.setattr(Jobs, "read", silent_store)
        worker.end(job_id_of(batch_id, 1, 0), COMPLETED)
        worker.start(job_id_of(batch_id, 2, 0), lease_s=60)  # its worker is silent
        await http.post(f"/v1/batches/{batch_id}/cancel")
        await until(http, batch_id, lambda batch: batch["request_counts"]["failed"] == 1)
        await asyncio.sleep(1)
        assert (await http.get(f"/v1/batches/{batch_id}")).json()["status"] == "cancelling"
        monkeypatch.setattr(Jobs, "read", read)
        batch = await until(http, batch_id, has("cancelled"))

    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1, "cancelled": 1}


async def test_a_batch_with_an_idempotency_key_is_created_once(serving: Serving, worker: FakeWorker):
    async with serving(api_keys=KEYS) as http:
        alice, bob = bearer(ALICE) | {"Idempotency-Key": "k"}, bearer(BOB) | {"Idempotency-Key": "k"}
        file_id = (await upload(http, jsonl(2), headers=bearer(ALICE))).json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        replies = await asyncio.gather(*(http.post("/v1/batches", json=body, headers=alice) for _ in range(5)))
        assert {reply.status_code for reply in replies} == {200}
        [batch_id] = {reply.json()["id"] for reply in replies}
        reused = await http.post("/v1/batches", json=body | {"completion_window": "1h"}, headers=alice)
        assert (reused.status_code, reused.json()["error"]["param"]) == (409, "Idempotency-Key")
        other = await http.post("/v1/batches", json=body, headers=bob)
        assert other.status_code == 404  # neither the batch nor the file is Bob's
        listed = (await http.get("/v1/batches", headers=alice)).json()["data"]
        assert [one["id"] for one in listed] == [batch_id]


async def test_a_line_of_the_output_is_one_line_for_every_reader(serving: Serving, worker: FakeWorker):
    custom_id = "a\u2028b\x85c\u2029"
    line = json.loads(jsonl(1)) | {"custom_id": custom_id}
    async with serving() as http:
        batch_id = await start(http, json.dumps(line).encode())
        await eventually(lambda: len(worker.waiting()) == 1)
        worker.end(job_id_of(batch_id, 1, 0), COMPLETED)
        batch = await until(http, batch_id, has("completed"))
        text = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text
    [found] = text.splitlines()
    assert json.loads(found)["custom_id"] == custom_id


async def test_the_output_of_a_running_batch_is_read_as_it_grows(
    serving: Serving, worker: FakeWorker, redis: Redis, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(collect, "GROUP", 3)
    monkeypatch.setattr(files, "ENDS_AT_ONCE", 2)
    async with serving() as http:
        batch_id = await start(http, jsonl(30))
        await eventually(lambda: len(worker.waiting()) == 30)
        offset, seen = 0, b""
        for num_ended in (1, 12, 27):
            for number in range(offset + 1, num_ended + 1):
                worker.end(job_id_of(batch_id, number, 0), COMPLETED)
            batch = await until(http, batch_id, lambda batch, n=num_ended: batch["request_counts"]["completed"] == n)
            path = f"/v1/files/{batch['output_file_id']}"
            reply = await http.get(f"{path}/content", params={"offset": offset})
            assert (reply.headers["X-Incomplete"], reply.headers["X-Last-Line"]) == ("true", str(num_ended))
            offset, seen = num_ended, seen + reply.content
            assert seen == (await http.get(f"{path}/content")).content
        assert (await http.get(path)).json()["status"] == "uploaded"
        assert (await http.delete(path)).status_code == 409
        for number in range(28, 31):
            worker.end(job_id_of(batch_id, number, 0), COMPLETED)
        await until(http, batch_id, has("completed"))
        reply = await http.get(f"{path}/content", params={"offset": offset})
        assert (reply.headers["X-Incomplete"], reply.headers["X-Last-Line"]) == ("false", "30")
        whole = (await http.get(f"{path}/content")).content
        assert seen + reply.content == whole
        assert {json.loads(line)["custom_id"] for line in whole.splitlines()} == {str(n) for n in range(1, 31)}
        lines = whole.splitlines(keepends=True)
        for number in range(33):  # 31 and later: no line is left
            rest = await http.get(f"{path}/content", params={"offset": number})
            assert rest.content == b"".join(lines[number:])
        assert (await http.get(path)).json()["num_lines"] == 30
        assert (await http.delete(path)).status_code == 200


async def test_the_lines_of_an_upload_are_read_from_an_offset(serving: Serving, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", 300)
    monkeypatch.setattr(files, "PIECE_BYTES", 7)
    text = jsonl(8).rstrip(b"\n")
    async with serving() as http:
        path = f"/v1/files/{(await upload(http, text)).json()['id']}/content"
        for offset in range(10):
            reply = await http.get(path, params={"offset": offset})
            assert reply.content == b"".join(text.splitlines(keepends=True)[offset:])
            assert (reply.headers["X-Incomplete"], reply.headers["X-Last-Line"]) == ("false", "8")
        for bad in ("-1", "a", "1.5"):
            assert (await http.get(path, params={"offset": bad})).status_code == 400


async def test_lines_whose_prompts_begin_alike_are_queued_together_in_windows(
    serving: Serving, worker: FakeWorker, redis: Redis, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(start_lines, "MAX_JOBS", 40)
    monkeypatch.setattr(start_lines, "MIN_JOBS", 20)
    monkeypatch.setattr(files, "CHUNK_BYTES", 500)  # several chunks a window
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "demo", "prompt": f"prompt {number % 4}: {number}"},
        }
        for number in range(60)
    ]

    def prompts() -> list[str]:
        """Return which prompt each queued job begins with, in the order of the queue."""
        job_ids = [job_id.decode() for job_id in redis.lrange("rq:queue:demo:low", 0, -1)]
        found = [wire.decode_request(redis.get(store.Keys.request(job_id)) or b"") for job_id in job_ids]
        return [request.prompt.split(":")[0] for request in found]

    async with serving() as http:
        batch_id = await start(http, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        await eventually(lambda: len(worker.waiting()) == 40)
        queued = prompts()
        assert queued == sorted(queued)
        first = sorted(worker.waiting())
        for job_id in first[:19]:
            worker.end(job_id, COMPLETED)
        await until(http, batch_id, lambda batch: batch["request_counts"]["completed"] == 19)
        assert len(worker.waiting()) == 21
        for job_id in first[19:]:
            worker.end(job_id, COMPLETED)
        await eventually(lambda: len(worker.waiting()) == 20)
        queued = prompts()
        assert queued == sorted(queued)
        for job_id in worker.waiting():
            worker.end(job_id, COMPLETED)
        batch = await until(http, batch_id, has("completed"))
    assert batch["request_counts"] == {"total": 60, "completed": 60, "failed": 0}


async def test_answers_are_collected_while_the_lines_of_a_window_are_queued(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(start_lines, "QUEUE_S", 0.1)
    submit = start_lines._submit

    async def slow(*args: Any) -> bool:
        await asyncio.sleep(0.03)
        return await submit(*args)

    monkeypatch.setattr(start_lines, "_submit", slow)
    num_queued: list[int] = []  # whenever answers were seen
    async with serving() as http:
        batch_id = await start(http, jsonl(50))
        ended: set[str] = set()
        batch = await until(http, batch_id, has("in_progress"))
        while batch["status"] != "completed":
            for job_id in worker.waiting() - ended:
                worker.end(job_id, COMPLETED)
                ended.add(job_id)
            batch = (await http.get(f"/v1/batches/{batch_id}")).json()
            if batch["request_counts"]["completed"]:
                num_queued.append(len(ended))
            await asyncio.sleep(0.01)
    assert min(num_queued) < 25
    assert batch["request_counts"] == {"total": 50, "completed": 50, "failed": 0}


async def test_no_jobs_are_queued_after_another_driver_has_canceled_those_that_exist(
    serving: Serving, worker: FakeWorker, redis: Redis, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(start_lines, "CHECK_S", 0.0)
    submit = start_lines._submit
    submitted: list[str] = []
    async with serving() as http:

        async def cancel_meanwhile(services: BatchServices, lease: BatchLease, *args: Any) -> bool:
            submitted.append(lease.batch_id)
            await http.post(f"/v1/batches/{lease.batch_id}/cancel")
            redis.hincrby(store.Keys.batch(lease.batch_id), "turn", 1)  # another driver has claimed it
            return await submit(services, lease, *args)

        monkeypatch.setattr(start_lines, "_submit", cancel_meanwhile)
        batch_id = await start(http, jsonl(5))
        await until(http, batch_id, has("cancelled"))
    assert submitted == [batch_id]
    assert worker.waiting() == set()


async def test_a_batch_goes_on_where_reading_its_lines_takes_longer_than_queueing_may(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(start_lines, "QUEUE_S", 0.0)
    texts = BatchStore.texts

    async def slow(*args: Any) -> list[bytes]:
        await asyncio.sleep(0.05)
        return await texts(*args)

    monkeypatch.setattr(BatchStore, "texts", slow)
    ended: set[str] = set()
    async with serving() as http:
        batch_id = await start(http, jsonl(5))
        async with asyncio.timeout(30):
            while (await http.get(f"/v1/batches/{batch_id}")).json()["status"] != "completed":
                for job_id in worker.waiting() - ended:
                    worker.end(job_id, COMPLETED)
                    ended.add(job_id)
                await asyncio.sleep(0.01)
    assert len(ended) == 5


async def test_lines_for_which_there_is_no_room_yet_are_queued_together_too(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    chats = [
        [{"role": "system", "content": f"prompt {number % 3}"}, {"role": "user", "content": str(number)}]
        for number in range(24)
    ]
    bodies = [
        {"max_tokens": 1, "messages": chat, "model": "demo"} | ({"tools": tools} if number % 2 else {})
        for number, chat in enumerate(chats)
    ]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    queued: dict[bytes, tuple[bool, str]] = {}
    async with serving(max_queue_depth=5) as http:
        text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        batch_id = await start(http, text, endpoint="/v1/chat/completions")
        while len(queued) < 24:
            await eventually(lambda: worker.waiting() - {job_id.decode() for job_id in queued})
            for job_id in redis.lrange("rq:queue:demo:low", 0, -1):
                request = wire.decode_request(redis.get(store.Keys.request(job_id.decode())) or b"")
                queued.setdefault(job_id, (bool(request.tools), request.messages[0].content))
            for job_id in worker.waiting():
                worker.end(job_id, COMPLETED)
        await until(http, batch_id, has("completed"))
    assert list(queued.values()) == sorted(queued.values())
    assert len(set(queued.values())) == 6


async def test_usage_counts_the_reasoning_of_chats(serving: Serving, worker: FakeWorker):
    sequence = wire.SequenceResult(
        token_ids=[2, 3, 4], token_bytes=[b"a", b"b", b"c"], text="c", channels=["reasoning", "reasoning", "content"]
    )
    usage = wire.Usage(prompt_tokens=5, completion_tokens=3)
    result = wire.Result(sequences=[sequence], temperature=1.0, usage=usage, stamp=PROVENANCE)
    body = {"model": "demo", "messages": [{"role": "user", "content": "a"}]}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    text = b"".join(json.dumps(line | {"custom_id": name}).encode() + b"\n" for name in "ab")
    async with serving() as http:
        batch_id = await start(http, text, endpoint="/v1/chat/completions")
        await eventually(lambda: len(worker.waiting()) == 2)
        for number in (1, 2):
            worker.end(job_id_of(batch_id, number, 0), result)
        batch = await until(http, batch_id, has("completed"))
    assert batch["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 16,
    }


async def test_a_batch_larger_than_the_queue_is_queued_as_room_comes(serving: Serving, worker: FakeWorker):
    async with serving(max_queue_depth=4) as http:
        batch_id = await start(http, jsonl(30))
        answered: set[str] = set()
        while len(answered) < 30:
            await eventually(lambda before=answered: worker.waiting() - before)
            waiting = worker.waiting() - answered
            assert len(waiting) <= 4
            for job_id in waiting:
                worker.end(job_id, COMPLETED)
            answered = answered | waiting
        batch = await until(http, batch_id, has("completed"))
    assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
    assert answered == {job_id_of(batch_id, number, 0) for number in range(1, 31)}


async def test_a_line_that_never_fits_the_queue_is_refused_and_delays_no_other(serving: Serving, worker: FakeWorker):
    async with serving(max_queue_depth=4) as http:
        batch_id = await start(http, jsonl(1, prompt=["a"] * 5) + jsonl(2).splitlines()[1])
        await eventually(worker.waiting)
        worker.end(job_id_of(batch_id, 2, 0), COMPLETED)
        batch = await until(http, batch_id, has("completed"))
        bad = await lines_of(http, batch["error_file_id"])
    response = bad["1"]["response"]
    assert (response["status_code"], response["body"]["error"]["param"]) == (413, "prompt")
    assert "(SCOREPOOL_MAX_QUEUE_DEPTH)" in response["body"]["error"]["message"]
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}


async def test_a_record_that_cannot_be_read_stops_no_other_batch(
    serving: Serving, worker: FakeWorker, redis: Redis, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(driver, "RETRY_S", 0.1)
    redis.hset(store.Keys.batch("batch_bad"), mapping={"owner": "local", "state": b"nonsense"})
    redis.zadd(store.Keys.batches, {"batch_bad": 0})
    async with serving(lease_s=0.5) as http:
        for _ in range(2):
            batch_id = await start(http, jsonl(1))
            await eventually(worker.waiting)
            worker.end(job_id_of(batch_id, 1, 0), COMPLETED)
            batch = await until(http, batch_id, has("completed"))
            assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_a_batch_that_fails_to_advance_delays_no_other_and_takes_its_owners_time(
    serving: Serving, worker: FakeWorker, redis: Redis, monkeypatch: pytest.MonkeyPatch
):
    async def fail_for_alice(services: BatchServices, lease: BatchLease) -> float:
        if lease.owner != "alice":
            return await advance.advance(services, lease)
        await asyncio.sleep(0.2)
        raise RedisError("another server does not answer")

    monkeypatch.setattr(driver, "RETRY_S", 3600.0)
    monkeypatch.setattr(driver, "advance", fail_for_alice)
    async with serving(api_keys=KEYS) as http:
        http.headers.update(bearer(ALICE))
        failing = await start(http, jsonl(1))
        await eventually(lambda: redis.hget(store.Keys.batch(failing), "turn"))
        http.headers.update(bearer(BOB))
        batch_id = await start(http, jsonl(1))
        await eventually(worker.waiting)
        worker.end(job_id_of(batch_id, 1, 0), COMPLETED)
        await until(http, batch_id, has("completed"))
    assert float(redis.hget(store.Keys.batch_turns, "alice")) >= 0.2
    assert redis.zscore(store.Keys.batches, failing) > time.time() + 5  # it is due again after its lease


async def test_the_errors_of_a_batch_list_the_first_hundred_bad_lines(serving: Serving, worker: FakeWorker):
    lines = [jsonl(number, model=f"nobody-{number}").splitlines(keepends=True)[-1] for number in range(1, 151)]
    async with serving() as http:
        batch = await until(http, await start(http, b"".join(lines)), has("failed"))
    assert [error["line"] for error in batch["errors"]["data"]] == list(range(1, 101))


async def test_the_error_of_a_line_that_is_no_json_speaks_of_the_line(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        batch = await until(http, await start(http, jsonl(1) + b"{nonsense\n[]\n"), has("failed"))
    first, second = batch["errors"]["data"]
    assert (first["line"], second["line"]) == (2, 3)
    assert first["message"].startswith("the line is not valid json: ")
    assert "Expected `object`, got `array`" in second["message"]


async def test_the_errors_of_a_batch_are_in_the_order_of_its_lines(serving: Serving, worker: FakeWorker):
    latin_1 = jsonl(3).splitlines()[2].replace(b'"a"', "é".encode("latin-1").join([b'"', b'"']))
    lines = [jsonl(1), jsonl(2, model="nobody").splitlines()[1] + b"\n", latin_1]
    async with serving() as http:
        batch = await until(http, await start(http, b"".join(lines)), has("failed"))
    first, second = batch["errors"]["data"]
    assert (first["line"], first["code"]) == (2, "model_not_found")
    assert (second["line"], second["code"]) == (3, "invalid_json_line")
    assert second["message"].endswith(": save the file as UTF-8")


async def test_a_file_with_too_many_lines_fails_its_batch(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(validate, "MAX_LINES", 3)
    async with serving() as http:
        batch = await until(http, await start(http, jsonl(4)), has("failed"))
    [error] = batch["errors"]["data"]
    assert (error["code"], error["message"]) == ("too_many_lines", "expected at most 3 lines, found more")


async def test_the_error_of_a_model_that_is_not_served_lists_the_names_and_aliases_that_are(
    serving: Serving, worker: FakeWorker
):
    worker.register(aliases=["gpt-4", "o"])
    async with serving() as http:
        batch = await until(http, await start(http, jsonl(1, model="nobody")), has("failed"))
    [error] = batch["errors"]["data"]
    assert (error["code"], error["line"], error["param"]) == ("model_not_found", 1, "body.model")
    assert error["message"].startswith("body.model: no live worker serves 'nobody'; live models: demo, gpt-4, o.")


async def test_a_batch_continues_while_replicas_are_missing(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scorepool.api.repositories.queue, "REPLICAS_TIMEOUT_S", 0.01)
    async with serving(redis_min_replicas=1) as http:
        batch_id = await start(http, jsonl(2))
        await eventually(lambda: len(worker.waiting()) == 2)
        for job_id in worker.waiting():
            worker.end(job_id, COMPLETED)
        batch = await until(http, batch_id, has("completed"))
    assert batch["request_counts"]["completed"] == 2


async def test_a_line_recorded_by_a_dead_driver_is_queued_by_the_next(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    async def die(*_: object) -> bool:
        raise asyncio.CancelledError

    async with serving(lease_s=0.5) as http:
        with monkeypatch.context() as patch:
            patch.setattr(start_lines, "_submit", die)  # ends the task as a crash of the process would
            batch_id = await start(http, jsonl(3))
            await until(http, batch_id, has("in_progress"))
            await asyncio.sleep(0.2)
            assert worker.waiting() == set()
        async with serving(lease_s=0.5):
            await eventually(lambda: len(worker.waiting()) == 3)
            for job_id in worker.waiting():
                worker.end(job_id, COMPLETED)
            batch = await until(http, batch_id, has("completed"))
    assert batch["request_counts"]["completed"] == 3


@pytest.mark.parametrize("has_written", [False, True])
async def test_a_batch_whose_driver_dies_while_it_finalizes_ends_once(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, has_written: bool
):
    finish = advance._finish

    async def die(*args: Any) -> None:
        if has_written:
            await finish(*args)
        raise asyncio.CancelledError

    async with serving(lease_s=0.5) as http:
        with monkeypatch.context() as patch:
            patch.setattr(advance, "_finish", die)
            batch_id = await start(http, jsonl(3))
            await eventually(lambda: len(worker.waiting()) == 3)
            for job_id in worker.waiting():
                worker.end(job_id, COMPLETED)
            batch = await until(http, batch_id, has("completed" if has_written else "finalizing"))
            await asyncio.sleep(0.2)
            assert batch["request_counts"]["completed"] == 3
            path = f"/v1/files/{batch['output_file_id']}/content"
            assert (await http.get(path)).headers["X-Incomplete"] == ("false" if has_written else "true")
        async with serving(lease_s=0.5):
            batch = await until(http, batch_id, has("completed"))
            await asyncio.sleep(0.6 * has_written)  # another driver could take it meanwhile
            assert await until(http, batch_id, has("completed")) == batch
        assert set(await lines_of(http, batch["output_file_id"])) == {"1", "2", "3"}
        assert (await http.get(path)).headers["X-Incomplete"] == "false"
        assert (await http.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 200


async def test_drivers_slower_than_their_lease_make_progress(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    """Without early commits each driver would take the batch before the other has written anything."""
    to_jobs = lines.to_jobs

    async def to_jobs_slowly(*args: Any) -> Any:
        await asyncio.sleep(0.02)
        return await to_jobs(*args)

    monkeypatch.setattr(lines, "to_jobs", to_jobs_slowly)
    async with serving(lease_s=0.3) as http, serving(lease_s=0.3):
        batch_id = await start(http, jsonl(40))  # 0.8 s for all lines
        await eventually(lambda: len(worker.waiting()) == 40)
        for job_id in worker.waiting():
            worker.end(job_id, COMPLETED)
        batch = await until(http, batch_id, has("completed"))
    assert batch["request_counts"]["completed"] == 40


async def test_of_two_drivers_with_a_lease_the_late_one_writes_nothing(
    serving: Serving, worker: FakeWorker, redis: Redis, redis_url: str
):
    async with serving() as http:
        batch_id = await start(http, jsonl(2))
        await eventually(lambda: len(worker.waiting()) == 2)
    async with AsyncRedis.from_url(redis_url) as connection:
        redis.zadd(store.Keys.batches, {batch_id: 0})
        late = await BatchLease.claim(connection, lease_s=5)
        assert late is not None
        assert await BatchLease.claim(connection, lease_s=5) is None
        redis.zadd(store.Keys.batches, {batch_id: 0})
        current = await BatchLease.claim(connection, lease_s=5)
        assert current is not None
        before, due_at = redis.hget(store.Keys.batch(batch_id), "state"), redis.zscore(store.Keys.batches, batch_id)
        with pytest.raises(LeaseLost):
            await late.commit(replace(late.progress, output_chunks=7))
        with pytest.raises(LeaseLost):
            await late.extend()
        await late.release(0.0)  # otherwise they would take the batch from each other forever
        assert redis.zscore(store.Keys.batches, batch_id) == due_at
        assert redis.hget(store.Keys.batch(batch_id), "state") == before
        await current.commit(replace(current.progress, output_chunks=7))
        assert wire.parse(redis.hget(store.Keys.batch(batch_id), "state"), BatchProgress, "msgpack").output_chunks == 7


async def test_a_failed_job_is_a_line_of_the_error_file(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        batch_id = await start(http, jsonl(2))
        await eventually(lambda: len(worker.waiting()) == 2)
        failure = wire.Failure(code="too_long", message="72 tokens, the context has 64", field="prompt")
        worker.end(job_id_of(batch_id, 1, 0), failure)
        worker.end(job_id_of(batch_id, 2, 0), COMPLETED)
        batch = await until(http, batch_id, has("completed"))
        bad = await lines_of(http, batch["error_file_id"])
    response = bad["1"]["response"]
    assert (response["status_code"], response["body"]["error"]["code"]) == (400, "context_length_exceeded")


async def test_jobs_of_a_written_line_expire_soon(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        batch_id = await start(http, jsonl(2))
        await eventually(lambda: len(worker.waiting()) == 2)
        assert (await http.get("/v1/jobs")).json()["jobs"][0]["status"] == "queued"
        good, bad = job_id_of(batch_id, 1, 0), job_id_of(batch_id, 2, 0)
        worker.end(good, COMPLETED)
        worker.end(bad, wire.Failure(code="numeric", message="NaN"), JobStatus.FAILED)
        await until(http, batch_id, has("completed"))
    for job_id in (good, bad):
        for key in (f"rq:job:{job_id}", store.Keys.outcome(job_id), store.Keys.request(job_id)):
            assert 0 < redis.ttl(key) <= 60
    assert redis.exists(store.Keys.batch_lines(batch_id)) == 0
    assert redis.zcard(store.Keys.batches) == 0


async def test_every_key_of_files_and_batches_expires_with_them(serving: Serving, worker: FakeWorker, redis: Redis):
    """An owner's lists too: they expire with the file or the batch that is kept longest."""
    files, batches = store.Keys.files_of("local"), store.Keys.batches_of("local")
    async with serving() as http:
        file = (await http.post("/v1/files", files={"file": ("a.jsonl", jsonl(2))}, data=SHORT_LIVED)).json()
        assert 0 < redis.ttl(files) <= HOUR_S
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = (await http.post("/v1/batches", json=body)).json()["id"]
        assert redis.ttl(files) >= redis.ttl(store.Keys.file(file["id"])) > 24 * HOUR_S
        assert redis.ttl(batches) > 30 * DAY_S
        await eventually(lambda: len(worker.waiting()) == 2)
        redis.delete(batches)  # a batch that ends after its list has expired is listed again
        for job_id in worker.waiting():
            worker.end(job_id, COMPLETED)
        await until(http, batch_id, has("completed"))
        await http.post("/v1/files", files={"file": ("a.jsonl", jsonl(1))}, data=SHORT_LIVED)
        assert [batch["id"] for batch in (await http.get("/v1/batches")).json()["data"]] == [batch_id]
        assert len((await http.get("/v1/files")).json()["data"]) == 3

    keys = [*redis.scan_iter("scorepool:file*"), *redis.scan_iter("scorepool:batch*")]
    ttls = {key.decode(): redis.ttl(key) for key in keys}
    assert min(ttls.values()) > 0
    for item, listed in (("scorepool:file:", files), ("scorepool:batch:", batches)):
        longest = max(ttl for key, ttl in ttls.items() if key.startswith(item))
        assert longest <= ttls[listed] <= longest + 60


async def test_a_list_that_the_previous_release_wrote_does_not_expire_before_its_files(serving: Serving, redis: Redis):
    redis.zadd(store.Keys.files_of("local"), {"file-old": time.time()})
    async with serving() as http:
        await http.post("/v1/files", files={"file": ("a.jsonl", jsonl(1))}, data=SHORT_LIVED)
    assert 30 * DAY_S < redis.ttl(store.Keys.files_of("local")) <= 60 * DAY_S


async def test_a_cancelled_batch_leaves_nothing_in_a_shared_queue(serving: Serving, worker: FakeWorker, redis: Redis):
    low = "demo:low"
    async with serving(api_keys=KEYS, max_jobs_in_flight=4) as http:
        http.headers.update(bearer(ALICE))
        batch_id = await start(http, jsonl(20))
        await eventually(lambda: (len(worker.waiting()), redis.zcard(f"rq:deferred:{low}")) == (4, 16))
        await http.post(f"/v1/batches/{batch_id}/cancel")
        batch = await until(http, batch_id, has("cancelled"))
        assert batch["request_counts"] == {"total": 20, "completed": 0, "failed": 20, "cancelled": 20}
        assert len(await lines_of(http, batch["error_file_id"])) == 20
        http.headers.update(bearer(BOB))
        batch_id = await start(http, jsonl(2))
        await eventually(lambda: redis.zcard(f"rq:deferred:{low}") == 2)  # after alice's jobs
        claim = Claim(max_jobs=10, num_in_flight=0, max_in_flight=10, list_length=4)
        rows = Leases(redis, "mac", "rq:worker:mac", 60.0).claim([Queue(low, connection=redis)], claim).jobs
    assert [row.job_id for row in rows] == [job_id_of(batch_id, 1, 0), job_id_of(batch_id, 2, 0)]
    assert not list(redis.scan_iter("scorepool:backlog:*")) + list(redis.scan_iter("scorepool:turns:*"))


async def test_files_and_batches_of_another_key_do_not_exist(serving: Serving, worker: FakeWorker):
    async with serving(api_keys=KEYS) as http:
        file = (await upload(http, jsonl(1), headers=bearer(ALICE))).json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await http.post("/v1/batches", json=body, headers=bearer(ALICE))).json()["id"]
        calls = [
            ("GET", f"/v1/files/{file}"),
            ("GET", f"/v1/files/{file}/content"),
            ("DELETE", f"/v1/files/{file}"),
            ("GET", f"/v1/batches/{batch}"),
            ("POST", f"/v1/batches/{batch}/cancel"),
        ]
        for method, path in calls:
            assert (await http.request(method, path, headers=bearer(BOB))).status_code == 404
        assert (await http.post("/v1/batches", json=body, headers=bearer(BOB))).status_code == 404
        for path in ("/v1/files", "/v1/batches"):
            assert (await http.get(path, headers=bearer(BOB))).json()["data"] == []
            assert len((await http.get(path, headers=bearer(ALICE))).json()["data"]) == 1


async def test_a_large_or_malformed_upload_is_refused(serving: Serving, redis: Redis):
    async with serving(max_file_bytes=100_000, max_body_bytes=10_000) as http:
        too_large = await upload(http, jsonl(5000))
        large = await upload(http, jsonl(1000))
        long = await upload(http, jsonl(1) + b"x" * 50_000)
        form = {"data": {"purpose": "batch"}, "files": {"other": ("a", b"")}}
        replies = [
            await http.post("/v1/files", json={}),
            await http.post("/v1/files", **form),
            await http.post("/v1/files", content=b"--b\r\nnonsense", headers={"Content-Type": "multipart/form-data"}),
            await http.post("/v1/files", content=b"--b\r\nnonsense", headers={"Content-Type": FORM}),
            await http.post("/v1/files", content=FORM_PART + b"{}", headers={"Content-Type": FORM}),  # cut off
            await upload(http, jsonl(1), headers={"Origin": "https://evil.example"}),
        ]
        assert (await http.get("/v1/files")).json()["data"] == []
    assert [(reply.status_code, reply.json()["error"]["param"]) for reply in (large, long)] == [(413, "file")] * 2
    assert "(SCOREPOOL_MAX_FILE_BYTES)" in large.json()["error"]["message"]
    message = "file: line 2 is longer than 10000 bytes (SCOREPOOL_MAX_BODY_BYTES)"
    assert long.json()["error"]["message"] == message
    assert too_large.status_code == 413
    assert [reply.status_code for reply in replies] == [415, 400, 400, 400, 400, 403]
    assert all(
        redis.ttl(key) > 0 for key in redis.scan_iter("scorepool:file:*")
    )  # the chunks of refused uploads expire


async def test_owners_take_turns_at_the_drivers_time(
    serving: Serving, worker: FakeWorker, redis: Redis, redis_url: str
):
    async with serving(api_keys=KEYS) as http:
        for key, count in ((ALICE, 6), (BOB, 1)):
            http.headers.update(bearer(key))
            file = (await upload(http, jsonl(1))).json()["id"]
            body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
            for _ in range(count):
                assert (await http.post("/v1/batches", json=body)).status_code == 200
    # The first key's batches have been due for longer. The drivers of the server have been closed.
    owner_of = {
        id_: redis.hget(store.Keys.batch(id_.decode()), "owner") for id_ in redis.zrange(store.Keys.batches, 0, -1)
    }
    redis.delete(store.Keys.batch_turns)
    redis.zadd(store.Keys.batches, {id_: int(owner == b"bob") for id_, owner in owner_of.items()})
    connection = AsyncRedis.from_url(redis_url)
    owners = []
    for _ in range(6):
        lease = await BatchLease.claim(connection, 20)
        assert lease is not None
        owners.append(lease.owner)
        lease._charged_at -= 1.0  # it takes a second
        await lease.release(0)
    await connection.aclose()
    assert [set(owners[index : index + 2]) for index in (0, 2, 4)] == [{"alice", "bob"}] * 3


async def test_a_key_has_a_bounded_number_of_batches_that_have_not_ended(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    async with serving(api_keys=KEYS, max_batches_per_key=2) as http:
        http.headers.update(bearer(ALICE))
        file = (await upload(http, jsonl(1))).json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        redis.sadd(store.Keys.live_batches_of("alice"), "batch_whose_creation_failed")
        first, _ = [(await http.post("/v1/batches", json=body)).json()["id"] for _ in range(2)]
        refused = await http.post("/v1/batches", json=body)
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        await http.post(f"/v1/batches/{first}/cancel")
        await until(http, first, has("cancelled"))
        assert (await http.post("/v1/batches", json=body)).status_code == 200


async def test_many_batches_are_created_at_once_on_few_connections(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scorepool.api.server, "MAX_CONNECTIONS", 4)
    async with serving(api_keys=KEYS, max_bytes_per_key=2**30) as http, asyncio.timeout(30):
        file_id = (await upload(http, jsonl(1), headers=bearer(ALICE))).json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        creating = [asyncio.create_task(http.post("/v1/batches", json=body, headers=bearer(ALICE))) for _ in range(100)]
        await asyncio.wait(creating, return_when=asyncio.FIRST_COMPLETED)
        assert (await http.get("/v1/jobs", headers=bearer(BOB))).status_code == 200
        assert not all(task.done() for task in creating)  # Bob has not waited for them
        replies = await asyncio.gather(*creating)
        assert {reply.status_code for reply in replies} == {200}
        assert len({reply.json()["id"] for reply in replies}) == 100
