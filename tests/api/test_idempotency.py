"""One Idempotency-Key is one job, however often and however concurrently it is sent."""

import asyncio
import hashlib

import msgspec
import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

import scorepool.api.repositories.queue
from scorepool import store, wire
from scorepool.api.repositories.queue import Queue
from tests.api.conftest import ALICE, BOB, KEYS, Serving, bearer, score
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio
KEY = {"Idempotency-Key": "order-1"}


async def test_twenty_submits_at_once_make_one_job(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as one, serving() as other:
        replies = await asyncio.gather(
            *(http.post("/v1/jobs", json=score(), headers=KEY) for http in [one, other] * 10)
        )
    assert {reply.status_code for reply in replies} == {202}
    assert len({reply.json()["id"] for reply in replies}) == 1
    assert sum("idempotent-replayed" not in reply.headers for reply in replies) == 1
    assert sum(reply.json()["is_replay"] for reply in replies) == len(replies) - 1
    assert redis.llen("rq:queue:demo") == 1


async def test_the_same_request_in_another_format_is_the_same_body(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        first = await http.post("/v1/jobs", json=score(), headers=KEY)
        packed = msgspec.msgpack.encode(score(top_logprobs=0))
        headers = KEY | {"Content-Type": "application/msgpack"}
        second = await http.post("/v1/jobs", content=packed, headers=headers)
    assert first.json()["id"] == second.json()["id"]


async def test_another_body_under_the_same_key_is_a_conflict(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        await http.post("/v1/jobs", json=score(), headers=KEY)
        reply = await http.post("/v1/jobs", json=score(rank=True), headers=KEY)
    assert (reply.status_code, reply.json()["error"]["field"]) == (409, "Idempotency-Key")
    assert redis.llen("rq:queue:demo") == 1


async def test_a_replay_answers_with_the_jobs_present_status(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        id_ = (await http.post("/v1/jobs", json=score(), headers=KEY)).json()["id"]
        worker.start(id_)
        started = await http.post("/v1/jobs", json=score(), headers=KEY)
        worker.end(id_)
        ended = await http.post("/v1/jobs", json=score(), headers=KEY)
        waited = await http.post("/v1/jobs", json=score(), headers=KEY | {"Prefer": "wait=5"})
    assert [reply.json()["status"] for reply in (started, ended, waited)] == ["started", "finished", "finished"]
    assert [reply.status_code for reply in (started, ended, waited)] == [202, 202, 200]
    assert waited.json()["id"] == id_


async def test_a_replay_is_answered_even_if_the_queue_is_full_or_the_model_gone(serving: Serving, worker: FakeWorker):
    async with serving(max_queue_depth=1) as http:
        first = await http.post("/v1/jobs", json=score(), headers=KEY)
        full = await http.post("/v1/jobs", json=score(), headers=KEY)
    worker.unregister()
    async with serving() as http:
        gone = await http.post("/v1/jobs", json=score(), headers=KEY)
        other_body = await http.post("/v1/jobs", json=score(rank=True), headers=KEY)
        new = await http.post("/v1/jobs", json=score(), headers={"Idempotency-Key": "order-2"})
    assert first.json()["id"] == full.json()["id"] == gone.json()["id"]
    assert (other_body.status_code, new.status_code) == (409, 404)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/jobs", score()),
        ("/v1/jobs/bulk", [score(), score()]),
        ("/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"model": "demo", "prompt": "a", "stream": True}),
    ],
)
async def test_a_submission_without_a_key_that_replicas_lack_is_canceled(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, path: str, body: object
):
    monkeypatch.setattr(scorepool.api.repositories.queue, "REPLICAS_TIMEOUT_S", 0.01)
    async with serving(redis_min_replicas=1) as http:
        reply = await http.post(path, json=body)
        jobs = (await http.get("/v1/jobs")).json()["jobs"]

    message = reply.json()["error"]["message"]
    assert (reply.status_code, {job["status"] for job in jobs}) == (503, {"canceled"})
    assert message.endswith("so the request was canceled; send it again")
    assert "Idempotency-Key" not in message
    assert worker.waiting() == set()


async def test_a_submission_under_a_key_that_replicas_lack_goes_on(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scorepool.api.repositories.queue, "REPLICAS_TIMEOUT_S", 0.01)
    async with serving(redis_min_replicas=1) as http:
        reply = await http.post("/v1/jobs", json=score(), headers=KEY)
    async with serving() as http:
        again = await http.post("/v1/jobs", json=score(), headers=KEY)

    assert (reply.status_code, again.status_code) == (503, 202)
    assert reply.json()["error"]["message"].endswith("send it again with the same Idempotency-Key")
    assert (again.json()["is_replay"], worker.waiting()) == (True, {again.json()["id"]})


async def test_a_bulk_under_a_key_is_accepted_once_as_a_whole(serving: Serving, worker: FakeWorker, redis: Redis):
    bodies = [score(), score(), score(rank=True)]
    async with serving() as http:
        replies = await asyncio.gather(*(http.post("/v1/jobs/bulk", json=bodies, headers=KEY) for _ in range(10)))
        changed = await http.post("/v1/jobs/bulk", json=[*bodies[:2], score(rank=False)], headers=KEY)
        longer = await http.post("/v1/jobs/bulk", json=[*bodies, score()], headers=KEY)
        single = await http.post("/v1/jobs", json=score(), headers=KEY)
    ids = [[job["id"] for job in reply.json()] for reply in replies]
    assert all(other == ids[0] for other in ids)
    assert len(set(ids[0])) == 3
    assert (changed.status_code, longer.status_code) == (409, 409)
    assert single.status_code == 202
    assert redis.llen("rq:queue:demo") == 4


async def test_the_same_key_of_two_owners_names_two_jobs(serving: Serving, worker: FakeWorker):
    async with serving(api_keys=KEYS) as http:
        alice = await http.post("/v1/jobs", json=score(), headers=KEY | bearer(ALICE))
        bob = await http.post("/v1/jobs", json=score(rank=True), headers=KEY | bearer(BOB))
    assert (alice.status_code, bob.status_code) == (202, 202)
    assert alice.json()["id"] != bob.json()["id"]


async def test_the_id_of_a_job_cannot_be_computed_from_owner_and_key(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    async with serving() as http:
        first = (await http.post("/v1/jobs", json=score(), headers=KEY)).json()["id"]
        redis.flushdb()
        worker.register()
        assert (await http.post("/v1/jobs", json=score(), headers=KEY)).json()["id"] != first


async def test_all_processes_have_the_secret_of_a_redis_that_was_emptied(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    async with serving() as one, serving() as other:
        await one.post("/v1/jobs", json=score(), headers=KEY)
        await other.post("/v1/jobs", json=score(), headers=KEY)
        redis.flushdb()
        worker.register()
        replies = await asyncio.gather(*(http.post("/v1/jobs", json=score(), headers=KEY) for http in [one, other] * 5))
    assert len({reply.json()["id"] for reply in replies}) == 1
    assert redis.llen("rq:queue:demo") == 1


@pytest.mark.parametrize("num", [None, 2])
async def test_a_submission_that_release_0_1_0_accepted_is_found_again(
    serving: Serving, worker: FakeWorker, redis: Redis, redis_url: str, num: int | None
):
    texts = ["local\0order-1\0" if num is None else f"local\0order-1\0{index}" for index in range(num or 1)]
    ids = [hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in texts]
    requests = [wire.parse(msgspec.json.encode(score()), wire.Request)] * len(ids)
    async with AsyncRedis.from_url(redis_url) as connection:
        await Queue(connection, store.Settings(), lambda _: 1, False).submit("local", requests, ids)
    async with serving() as http:
        path, body = ("/v1/jobs", score()) if num is None else ("/v1/jobs/bulk", [score()] * num)
        again = await http.post(path, json=body, headers=KEY)
        found = [again.json()["id"]] if num is None else [job["id"] for job in again.json()]
        assert found == ids
        assert again.headers["idempotent-replayed"] == "true"
        for job_id in ids:
            worker.end(job_id)
            await http.delete(f"/v1/jobs/{job_id}")
        after = await http.post(path, json=body, headers=KEY)
    assert after.status_code == 202
    assert ids[0] not in after.text
