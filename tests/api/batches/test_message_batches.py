"""`/v1/messages/batches` with a fake worker, so that every moment can be chosen."""

import json
import zlib
from typing import Any

import httpx
import pytest
import redis.exceptions
from msgspec.structs import replace
from redis import Redis
from rq.job import JobStatus

from scorepool import store, wire
from scorepool.api.batches.lines import job_id_of
from scorepool.api.repositories.batches import Batches
from tests.api.batches.test_batches import has, let_expire, until
from tests.api.conftest import ALICE, BOB, KEYS, Serving, bearer, eventually
from tests.api.fake_worker import COMPLETED, FakeWorker

pytestmark = pytest.mark.anyio
PATH = "/v1/messages/batches"
PARAMS = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}


def requests(count: int, **params: Any) -> list[dict[str, Any]]:
    return [{"custom_id": f"r{number}", "params": PARAMS | params} for number in range(1, count + 1)]


async def create(http: httpx.AsyncClient, asked: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    reply = await http.post(PATH, json={"requests": asked}, **options)
    assert reply.status_code == 200, reply.text
    return reply.json()


def own(batch_id: str) -> str:
    return batch_id.replace("msgbatch_", "batch_")


async def results(http: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    reply = await http.get(f"{PATH}/{batch_id}/results")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/x-jsonl")
    found = [json.loads(line) for line in reply.text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one["result"] for one in found}


async def test_each_request_ends_as_it_went(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        asked = [*requests(4), {"custom_id": "bad", "params": PARAMS | {"n": 2}}]
        batch = await create(http, asked)
        assert (batch["processing_status"], batch["request_counts"]["processing"]) == ("in_progress", 5)
        assert (await http.get(f"{PATH}/{batch['id']}/results")).status_code == 409
        assert (await http.delete(f"{PATH}/{batch['id']}")).status_code == 409
        await eventually(lambda: len(worker.waiting()) == 4)
        worker.end(job_id_of(own(batch["id"]), 1, 0), COMPLETED)
        failure = wire.Failure(code="numeric", message="NaN")
        worker.end(job_id_of(own(batch["id"]), 2, 0), failure, JobStatus.FAILED)
        await until(http, own(batch["id"]), lambda one: one["request_counts"]["failed"] == 2)
        let_expire(redis, own(batch["id"]))
        await until(http, own(batch["id"]), has("expired"))
        batch = (await http.get(f"{PATH}/{batch['id']}")).json()
        found = await results(http, batch["id"])

    assert batch["request_counts"] == {"processing": 0, "succeeded": 1, "errored": 2, "canceled": 0, "expired": 2}
    assert batch["processing_status"] == "ended"
    assert batch["ended_at"] >= batch["created_at"]
    assert {name: one["type"] for name, one in found.items()} == {
        "r1": "succeeded",
        "r2": "errored",
        "r3": "expired",
        "r4": "expired",
        "bad": "errored",
    }
    assert found["r1"]["message"]["type"] == "message"
    assert found["r2"]["error"]["error"] == {"type": "api_error", "message": "numeric: NaN"}
    assert found["bad"]["error"]["type"] == "error"
    assert found["bad"]["error"]["error"]["type"] == "invalid_request_error"
    assert found["bad"]["error"]["error"]["message"].startswith("n: ")


async def test_a_canceled_batch_says_so_and_is_deleted_with_all_it_has(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    async with serving() as http:
        batch = await create(http, requests(2))
        await eventually(lambda: len(worker.waiting()) == 2)
        canceling = (await http.post(f"{PATH}/{batch['id']}/cancel")).json()
        assert (canceling["processing_status"], canceling["results_url"]) == ("canceling", None)
        await until(http, own(batch["id"]), has("cancelled"))
        batch = (await http.get(f"{PATH}/{batch['id']}")).json()
        assert batch["request_counts"]["canceled"] == 2
        assert batch["cancel_initiated_at"]
        assert {one["type"] for one in (await results(http, batch["id"])).values()} == {"canceled"}
        deleted = (await http.delete(f"{PATH}/{batch['id']}")).json()
        assert deleted == {"id": batch["id"], "type": "message_batch_deleted"}
        for path in ("", "/results"):
            assert (await http.get(f"{PATH}/{batch['id']}{path}")).status_code == 404
        assert (await http.get(PATH)).json()["data"] == (await http.get("/v1/files")).json()["data"] == []
        assert [key for key in redis.scan_iter() if own(batch["id"]).encode() in key] == []
        assert list(redis.scan_iter(f"{store.keys.PREFIX}:file*")) == []


async def test_a_batch_that_fails_as_a_whole_has_an_error_for_each_request(
    serving: Serving, worker: FakeWorker, redis: Redis, monkeypatch: pytest.MonkeyPatch
):
    async with serving() as http:
        monkeypatch.setattr("scorepool.api.batches.validate.MAX_LINES", 1)
        batch = await create(http, requests(2))
        await until(http, own(batch["id"]), has("failed"))
        batch = (await http.get(f"{PATH}/{batch['id']}")).json()
        found = await results(http, batch["id"])

    assert batch["request_counts"]["errored"] == 2
    assert [found[name]["error"]["error"]["message"] for name in ("r1", "r2")] == [
        "expected at most 1 lines, found more"
    ] * 2


async def test_a_batch_that_is_canceled_before_it_began_has_a_result_for_each_request(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    async with serving() as http:
        reply = await http.post(PATH, json={"requests": requests(3)})
        batch = (await http.post(f"{PATH}/{reply.json()['id']}/cancel")).json()
        await until(http, own(batch["id"]), has("cancelled"))
        batch = (await http.get(f"{PATH}/{batch['id']}")).json()
        assert batch["request_counts"]["canceled"] == 3
        assert [one["type"] for one in (await results(http, batch["id"])).values()] == ["canceled"] * 3


async def test_a_damaged_line_of_the_output_hides_no_other(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        batch = await create(http, requests(1))
        await eventually(lambda: len(worker.waiting()) == 1)
        worker.end(job_id_of(own(batch["id"]), 1, 0), COMPLETED)
        ended = await until(http, own(batch["id"]), has("completed"))
        parts = store.Keys.file_parts(ended["output_file_id"])
        text = b'{"custom_id": 1}\n\xff\n' + zlib.decompress(redis.hget(parts, "0"))
        redis.hset(parts, "0", zlib.compress(text))
        file = wire.parse(redis.hget(store.Keys.file(ended["output_file_id"]), "file"), wire.FileObject, "msgpack")
        redis.hset(store.Keys.file(file.id), "file", wire.encode(replace(file, bytes=len(text))))
        assert [one["type"] for one in (await results(http, batch["id"])).values()] == ["succeeded"]


async def test_batches_are_listed_both_ways(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        ids = [(await create(http, requests(1)))["id"] for _ in range(4)][::-1]
        page = (await http.get(PATH, params={"limit": 2})).json()
        assert [[one["id"] for one in page["data"]], page["has_more"]] == [ids[:2], True]
        page = (await http.get(PATH, params={"limit": 2, "after_id": page["last_id"]})).json()
        assert [[one["id"] for one in page["data"]], page["has_more"]] == [ids[2:], False]
        page = (await http.get(PATH, params={"limit": 2, "before_id": ids[3]})).json()
        assert [[one["id"] for one in page["data"]], page["has_more"]] == [ids[1:3], True]
        for query, field in (({"after_id": "x"}, "after_id"), ({"before_id": "x" * 65}, "before_id")):
            error = (await http.get(PATH, params=query)).json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["message"].startswith(f"{field}: ")


async def test_another_owners_batch_is_one_that_never_was(serving: Serving, worker: FakeWorker):
    async with serving(api_keys=KEYS) as http:
        batch = await create(http, requests(1), headers=bearer(ALICE))
        absent = f"msgbatch_{'0' * 32}"
        for method, path in (("GET", ""), ("GET", "/results"), ("POST", "/cancel"), ("DELETE", "")):
            replies = [
                await http.request(method, f"{PATH}/{id_}{path}", headers={"x-api-key": BOB})
                for id_ in (batch["id"], absent)
            ]
            assert [reply.status_code for reply in replies] == [404, 404]
            messages = [reply.json()["error"]["message"] for reply in replies]
            assert messages[0].replace(batch["id"], absent) == messages[1]
        assert (await http.get(f"{PATH}/{own(batch['id'])}", headers=bearer(ALICE))).status_code == 404
        assert (await http.get(PATH, headers={"x-api-key": BOB})).json()["data"] == []
        assert (await http.get(f"{PATH}/{batch['id']}", headers=bearer(ALICE))).json() == batch


@pytest.mark.parametrize(
    ("asked", "status", "field"),
    [
        ([], 400, "requests"),
        (requests(1) * 2, 400, "requests[1].custom_id"),
        ([{"custom_id": "a b", "params": PARAMS}], 400, "requests[0].custom_id"),
        ([{"custom_id": "a", "params": {}}], 400, "requests[0].params.model"),
        ([{"custom_id": "a", "params": []}], 400, "requests[0].params"),
        (requests(1, model="none"), 404, "requests[0].params.model"),
        ([{"custom_id": "a"}], 400, "requests[0].params"),
    ],
)
async def test_what_cannot_run_is_refused_at_the_door(
    serving: Serving, worker: FakeWorker, redis: Redis, asked: list[Any], status: int, field: str
):
    async with serving() as http:
        reply = await http.post(PATH, json={"requests": asked})
        assert (reply.status_code, reply.json()["type"]) == (status, "error")
        assert reply.json()["error"]["message"].startswith(f"{field}: ")
        packed = await http.post(PATH, content=b"\x80", headers={"Content-Type": "application/msgpack"})
        assert packed.status_code == 415
    assert list(redis.scan_iter(f"{store.keys.PREFIX}:file*")) == []


async def test_too_many_batches_leave_no_file(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving(max_batches_per_key=1) as http:
        await create(http, requests(1))
        num_keys = len(list(redis.scan_iter(f"{store.keys.PREFIX}:file:*")))
        assert (await http.post(PATH, json={"requests": requests(1)})).status_code == 429
        assert len(list(redis.scan_iter(f"{store.keys.PREFIX}:file:*"))) == num_keys


async def test_a_batch_whose_creation_got_no_reply_is_told_as_that(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    """It may have been made, as here: then it keeps its file."""
    create_batch = Batches.create

    async def create_without_reply(self: Batches, *args: Any, **options: Any) -> wire.Batch:
        await create_batch(self, *args, **options)
        raise redis.exceptions.TimeoutError("Timeout reading from socket")

    monkeypatch.setattr(Batches, "create", create_without_reply)
    async with serving() as http:
        reply = await http.post(PATH, json={"requests": requests(1)})
        assert reply.status_code == 503
        assert "it is not known whether" in reply.json()["error"]["message"]
        assert len((await http.get(PATH)).json()["data"]) == 1
        await eventually(lambda: len(worker.waiting()) == 1)


async def test_a_body_of_several_lines_is_one_line_of_the_file(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        content = json.dumps({"requests": requests(1, system="a\nb\r\u2028")}, indent=2)
        reply = await http.post(PATH, content=content.encode(), headers={"Content-Type": "application/json"})
        await eventually(worker.waiting)
        [job_id] = worker.waiting()
        request = worker.start(job_id)
        assert reply.status_code == 200
        assert isinstance(request, wire.Generate)
        assert request.messages is not None
        assert request.messages[0].content == "a\nb\r\u2028"
        created_at, expires_at = (reply.json()[name] for name in ("created_at", "expires_at"))
        assert expires_at > created_at
