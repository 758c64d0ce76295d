"""A job is submitted, read, listed, canceled and deleted over HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from redis import Redis
from redis.client import Pipeline
from rq.job import JobStatus

from scorepool import store, wire
from scorepool.api.repositories.jobs import MAX_SLICES, SLICE_SIZE
from tests.api.conftest import Serving, eventually, generate, score
from tests.api.fake_worker import RESULT, FakeWorker

pytestmark = pytest.mark.anyio
MSGPACK = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
HOOK = "https://example.com/hook"


async def submit(http: httpx.AsyncClient, body: object = None) -> str:
    reply = await http.post("/v1/jobs", json=body or score())
    assert reply.status_code == 202, reply.text
    return reply.json()["id"]


async def test_an_accepted_job_is_stored_as_rq_would_store_it(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        reply = await http.post("/v1/jobs", json=score(priority="high", timeout_s=7))
    id_ = reply.json()["id"]

    assert reply.status_code == 202
    assert reply.json() == {"id": id_, "status": "queued", "location": f"/v1/jobs/{id_}", "is_replay": False}
    assert reply.headers["location"] == f"/v1/jobs/{id_}"
    job = worker.job(id_)
    assert (job.func_name, job.args, job.kwargs) == (store.INFER, [], {})
    assert (job.origin, job.get_status(), job.timeout, job.retries_left) == ("demo:high", JobStatus.QUEUED, 7, 3)
    assert job.description == "score demo"
    assert job.result_ttl == job.failure_ttl == 86_400
    assert job.enqueued_at is not None
    assert redis.lrange("rq:queue:demo:high", 0, -1) == [id_.encode()]
    assert redis.smembers("rq:queues") == {b"rq:queue:demo:high"}
    assert redis.hmget(f"rq:job:{id_}", "owner", "model", "kind") == [b"local", b"demo", b"score"]
    assert isinstance(worker.start(id_), wire.Score)
    assert redis.ttl(store.Keys.request(id_)) == -1


async def test_expires_at_is_stored_in_the_jobs_hash_for_the_worker(serving: Serving, worker: FakeWorker, redis: Redis):
    expires_at = time.time() + 60.123456789
    async with serving() as http:
        id_ = await submit(http, score(expires_at=expires_at))

    assert float(redis.hget(f"rq:job:{id_}", "expires_at")) == expires_at
    request = worker.start(id_)
    assert request.expires_at == expires_at


async def test_head_is_get_without_the_body(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        id_ = await submit(http)
        for path in (f"/v1/jobs/{id_}", "/v1/jobs", "/v1/models", "/healthz", "/readyz"):
            got, head = await http.get(path), await http.head(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-type"] == got.headers["content-type"]
        assert (await http.head(f"/v1/jobs/{'0' * 32}")).status_code == 404
        assert (await http.head(f"/v1/jobs/{id_}/cancel")).status_code == 405


async def test_a_submission_wakes_as_many_workers_as_it_has_jobs_the_fastest_first(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    redis.zadd(store.Keys.waiting_workers("demo"), {"slow": 1.0, "gone": 9.0, "fast": 3.0, "middle": 2.0})
    names = {store.Keys.wake(name).encode(): name for name in ("slow", "fast", "middle")}
    with redis.pubsub() as channel:
        channel.subscribe(*names)
        for _ in names:
            assert channel.get_message(timeout=60)["type"] == "subscribe"
        async with serving() as http:
            await http.post("/v1/jobs/bulk", json=[score(), score()])
        woken = [channel.get_message(timeout=60) for _ in range(2)]
        assert [(names[message["channel"]], message["data"]) for message in woken] == [("fast", b""), ("middle", b"")]
        assert channel.get_message(timeout=0.05) is None
    assert redis.zrange(store.Keys.waiting_workers("demo"), 0, -1) == [b"slow"]


async def test_a_finished_job_shows_its_result_and_a_failed_one_its_failure(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        good, bad = await submit(http), await submit(http, generate())
        worker.start(good)
        started = (await http.get(f"/v1/jobs/{good}")).json()
        worker.end(good)
        worker.end(bad, wire.Failure(code="too_long", message="no", field="prompt"), JobStatus.FAILED)
        finished, failed = [(await http.get(f"/v1/jobs/{id_}")).json() for id_ in (good, bad)]

    assert (started["status"], started["result"], started["ended_at"]) == ("started", None, None)
    assert started["created_at"] <= started["started_at"]
    assert (finished["status"], finished["kind"], finished["failure"]) == ("finished", "score", None)
    assert finished["result"]["sequences"][0]["logprobs"] == [None, -0.25]
    assert finished["ended_at"] >= finished["started_at"]
    assert (failed["status"], failed["kind"], failed["result"]) == ("failed", "generate", None)
    assert failed["failure"] == {"type": "failure", "code": "too_long", "message": "no", "field": "prompt"}


async def test_msgpack_carries_the_same_job_with_packed_columns(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        reply = await http.post("/v1/jobs", content=msgspec.msgpack.encode(score()), headers=MSGPACK)
        accepted = wire.parse(reply.content, wire.Accepted, "msgpack")
        worker.end(accepted.id)
        packed = await http.get(f"/v1/jobs/{accepted.id}", headers=MSGPACK)
        plain = await http.get(f"/v1/jobs/{accepted.id}")

    assert packed.headers["content-type"] == "application/msgpack"
    assert isinstance(msgspec.msgpack.decode(packed.content)["result"]["sequences"][0]["logprobs"], bytes)
    job = wire.parse(packed.content, wire.Job, "msgpack")
    assert job.result is not None
    assert wire.encode(job.result) == wire.encode(RESULT)
    assert wire.encode_json(wire.parse(plain.content, wire.Job)) == wire.encode_json(job)


async def test_prefer_wait_answers_with_the_ended_job_when_it_ends_in_time(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        late = await http.post("/v1/jobs", json=score(), headers={"Prefer": "respond-async, wait=0"})
        waiting = asyncio.create_task(http.post("/v1/jobs", json=score(priority="low"), headers={"Prefer": "wait=20"}))
        await eventually(lambda: worker.redis.llen("rq:queue:demo:low"))
        worker.end(worker.redis.lindex("rq:queue:demo:low", 0).decode())
        in_time = await waiting

    assert (late.status_code, late.headers["preference-applied"]) == (202, "wait=0")
    assert set(late.json()) == {"id", "status", "location", "is_replay"}
    assert (in_time.status_code, in_time.headers["preference-applied"]) == (200, "wait=20")
    assert in_time.json()["status"] == "finished"
    assert in_time.headers["location"] == f"/v1/jobs/{in_time.json()['id']}"


@pytest.mark.parametrize(
    "prefer",
    ["wait=0", 'wait="0"', "WAIT = 0 ; a=b", 'a="x, wait=9", wait=0', r'a="\", wait=9", wait=0', "wait=0, wait=9"],
)
async def test_prefer_is_parsed_as_rfc_7240_defines_it(serving: Serving, worker: FakeWorker, prefer: str):
    async with serving() as http:
        reply = await http.post("/v1/jobs", json=score(), headers={"Prefer": prefer})
    assert (reply.status_code, reply.headers["preference-applied"]) == (202, "wait=0")


async def test_a_wait_above_the_limit_is_cut_and_echoed(serving: Serving, worker: FakeWorker):
    async with serving(max_wait_s=0.05) as http:
        id_ = await submit(http)
        read = await http.get(f"/v1/jobs/{id_}?wait=1000")
        within = await http.get(f"/v1/jobs/{id_}?wait=0.01")
        submitted = await http.post("/v1/jobs", json=score(), headers={"Prefer": "wait=9"})

    assert (read.status_code, read.headers["preference-applied"]) == (200, "wait=0.05")
    assert "preference-applied" not in within.headers
    assert submitted.headers["preference-applied"] == "wait=0"


async def test_bulk_answers_in_the_order_of_the_requests(serving: Serving, worker: FakeWorker):
    bodies = [score(priority=priority) for priority in ("low", "normal", "high", "low")]
    async with serving() as http:
        reply = await http.post("/v1/jobs/bulk", content=msgspec.msgpack.encode(bodies), headers=MSGPACK)
    accepted = wire.parse(reply.content, list[wire.Accepted], "msgpack")

    assert reply.status_code == 202
    assert [worker.start(job.id).priority for job in accepted] == ["low", "normal", "high", "low"]


async def test_a_webhook_gets_its_delivery_when_the_job_ends(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        id_ = await submit(http, score(webhook=HOOK))
        plain = await submit(http)
    assert redis.hget(f"rq:job:{id_}", "webhook") == HOOK.encode()
    assert not redis.exists(f"rq:job:{store.Keys.delivery(id_)}")
    worker.end(id_)
    worker.end(plain)
    delivery = worker.job(store.Keys.delivery(id_))

    assert delivery.func_name == store.DELIVER
    assert (delivery.args, delivery.kwargs) == ([], {})
    assert (delivery.origin, delivery.get_status()) == (store.WEBHOOKS, JobStatus.QUEUED)
    assert (delivery.retries_left, delivery.retry_intervals) == (9, [60])
    assert redis.lrange("rq:queue:webhooks", 0, -1) == [delivery.id.encode()]
    assert not redis.exists(f"rq:job:{store.Keys.delivery(plain)}")


async def test_a_queued_job_is_canceled_at_once_and_its_webhook_sent(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    async with serving() as http:
        id_ = await submit(http, score(webhook=HOOK))
        waiting = asyncio.create_task(http.get(f"/v1/jobs/{id_}?wait=60"))
        await asyncio.sleep(0)
        canceled = await http.post(f"/v1/jobs/{id_}/cancel")
        woken = await waiting
        again = await http.post(f"/v1/jobs/{id_}/cancel")

    assert (canceled.status_code, again.status_code) == (200, 200)
    assert canceled.json()["status"] == woken.json()["status"] == "canceled"
    assert canceled.json()["failure"]["code"] == "canceled"
    assert canceled.json()["ended_at"] is not None
    assert redis.llen("rq:queue:demo") == 0
    assert redis.zscore("rq:canceled:demo", id_) is not None
    assert redis.get(store.Keys.request(id_)) is None
    assert redis.ttl(f"rq:job:{id_}") > 0
    assert redis.lrange("rq:queue:webhooks", 0, -1) == [store.Keys.delivery(id_).encode()]
    assert worker.job(store.Keys.delivery(id_)).get_status() == JobStatus.QUEUED
    assert worker.job(id_).get_status() == JobStatus.CANCELED


async def test_canceling_a_running_job_marks_it_and_notifies_its_worker(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    with redis.pubsub() as commands:
        commands.subscribe("rq:pubsub:w1")
        assert commands.get_message(timeout=60)["type"] == "subscribe"
        async with serving() as http:
            id_ = await submit(http)
            worker.start(id_, lease_s=60)
            reply = await http.post(f"/v1/jobs/{id_}/cancel")
        command = msgspec.json.decode(commands.get_message(timeout=60)["data"])

    assert (reply.status_code, reply.json()["status"]) == (202, "started")
    assert redis.hget(f"rq:job:{id_}", "cancel_requested") == b"1"
    assert command == {"command": "stop-job", "job_id": id_}


async def test_canceling_an_ended_job_is_a_conflict_that_names_its_status(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        id_ = await submit(http)
        worker.end(id_)
        reply = await http.post(f"/v1/jobs/{id_}/cancel")

    assert reply.status_code == 409
    assert "finished" in reply.json()["error"]["message"]


async def test_a_deleted_job_leaves_no_key_behind(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        before = set(redis.keys())
        ids = [await submit(http, score(webhook=HOOK)) for _ in range(3)]
        worker.end(ids[0])
        worker.end(ids[1], wire.Failure(code="numeric", message="NaN"), JobStatus.FAILED)
        await http.post(f"/v1/jobs/{ids[2]}/cancel")
        replies = [(await http.delete(f"/v1/jobs/{id_}")).status_code for id_ in ids]
        gone = [(await http.delete(f"/v1/jobs/{id_}")).status_code for id_ in ids]
        listed = (await http.get("/v1/jobs")).json()

    assert (replies, gone) == ([204] * 3, [404] * 3)
    assert listed == {"jobs": [], "next_cursor": None}
    assert set(redis.keys()) - before <= {b"rq:queues", store.DONE.encode(), store.Keys.outcome_counts.encode()}
    assert before - set(redis.keys()) == set()


async def test_a_running_delivery_cannot_write_after_its_job_is_deleted(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    async with serving() as http:
        id_ = await submit(http, score(webhook=HOOK))
        worker.end(id_)
        delivery = store.Keys.delivery(id_)
        redis.zadd("rq:wip:webhooks", {f"{delivery}:e1": 9e9})
        redis.zadd(f"rq:executions:{delivery}", {"e1": 9e9})
        redis.hset(f"rq:execution:{delivery}:e1", "id", "e1")
        await http.delete(f"/v1/jobs/{id_}")

    assert [key for key in redis.scan_iter() if id_.encode() in key] == []
    assert redis.zcard("rq:wip:webhooks") == 0


@pytest.mark.parametrize("is_started", [False, True])
async def test_a_job_that_has_not_ended_cannot_be_deleted(serving: Serving, worker: FakeWorker, is_started: bool):
    async with serving() as http:
        id_ = await submit(http)
        if is_started:
            worker.start(id_)
        reply = await http.delete(f"/v1/jobs/{id_}")
        kept = await http.get(f"/v1/jobs/{id_}")

    assert (reply.status_code, kept.status_code) == (409, 200)
    assert f"POST /v1/jobs/{id_}/cancel" in reply.json()["error"]["message"]


async def test_a_started_job_whose_worker_is_gone_expires_with_its_lease(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    async with serving() as http:
        expires_at = time.time() + 0.5
        canceled, deleted = [await submit(http, score(expires_at=expires_at, webhook=HOOK)) for _ in range(2)]
        for id_ in (canceled, deleted):
            worker.start(id_, lease_s=1.5)
        await eventually(lambda: time.time() > expires_at)
        running = (await http.get(f"/v1/jobs/{canceled}")).json()
        ended = (await http.get(f"/v1/jobs/{canceled}?wait=60")).json()
        conflict = await http.post(f"/v1/jobs/{canceled}/cancel")
        recorded = (await http.get(f"/v1/jobs/{canceled}")).json()
        gone = await http.delete(f"/v1/jobs/{deleted}")

    assert (running["status"], ended["status"]) == ("started", "failed")
    assert (ended["failure"]["code"], ended["ended_at"]) == ("expired", expires_at)
    assert (conflict.status_code, gone.status_code) == (409, 204)
    assert (recorded["status"], recorded["failure"]) == ("failed", ended["failure"])
    assert redis.lrange("rq:queue:webhooks", 0, -1) == [store.Keys.delivery(canceled).encode()]
    assert redis.zcard("rq:wip:demo") == 0


@pytest.mark.parametrize(
    ("rq_status", "status", "code"),
    [
        ("failed", "failed", "crashed"),
        ("finished", "failed", "crashed"),
        ("canceled", "canceled", "canceled"),
        ("stopped", "canceled", "canceled"),
    ],
)
async def test_a_job_that_another_tool_ended_is_shown_with_a_failure(
    serving: Serving, worker: FakeWorker, redis: Redis, rq_status: str, status: str, code: str
):
    async with serving() as http:
        id_ = await submit(http)
        redis.hset(f"rq:job:{id_}", "status", rq_status)
        job = (await http.get(f"/v1/jobs/{id_}?wait=60")).json()
        [listed] = (await http.get("/v1/jobs")).json()["jobs"]

    assert (job["status"], listed["status"], job["failure"]["code"]) == (status, status, code)


async def test_the_old_outcome_of_a_requeued_job_is_not_shown(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        id_ = await submit(http)
        worker.end(id_, wire.Failure(code="crashed", message="x"), JobStatus.FAILED)
        redis.hset(f"rq:job:{id_}", "status", "queued")
        job = (await http.get(f"/v1/jobs/{id_}")).json()

    assert (job["status"], job["failure"], job["ended_at"]) == ("queued", None, None)


async def test_pages_list_every_job_once_newest_first(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        accepted = (await http.post("/v1/jobs/bulk", json=[score()] * 25)).json()
        seen, lengths, params = [], [], {"limit": "10"}
        while True:
            page = (await http.get("/v1/jobs", params=params)).json()
            seen += [job["id"] for job in page["jobs"]]
            lengths.append(len(page["jobs"]))
            if page["next_cursor"] is None:
                break
            params["cursor"] = page["next_cursor"]
            await submit(http)  # a newer job does not move the pages that follow

    assert seen == [job["id"] for job in reversed(accepted)]
    assert lengths == [10, 10, 5]


async def test_the_list_is_filtered_by_status_and_model(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        queued, ended = await submit(http), await submit(http)
        other = await submit(http, score(model="other", wait_for_model=True))
        worker.end(ended)

        async def ids(**params: str) -> list[str]:
            return [job["id"] for job in (await http.get("/v1/jobs", params=params)).json()["jobs"]]

        assert await ids(status="finished") == [ended]
        assert await ids(status="queued") == [other, queued]
        assert await ids(model="demo") == [ended, queued]
        assert await ids(model="demo", status="queued") == [queued]
        assert await ids(status="failed") == []


async def test_the_list_is_filtered_by_kind_and_time(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        bodies = [score(), generate(), score(), generate(), score()]
        accepted = [await submit(http, body) for body in bodies]
        created = [(await http.get(f"/v1/jobs/{job_id}")).json()["created_at"] for job_id in accepted]

        async def ids(**params: str) -> list[int]:
            reply = await http.get("/v1/jobs", params=params)
            return [accepted.index(job["id"]) for job in reply.json()["jobs"]]

        assert await ids(kind="generate") == [3, 1]
        assert await ids(created_from=str(created[1])) == [4, 3, 2, 1]
        assert await ids(created_before=str(created[3])) == [2, 1, 0]
        assert await ids(created_from=str(created[1]), created_before=str(created[4]), kind="score") == [2]
        assert await ids(created_from=str(created[4] + 60)) == []
        page = (await http.get("/v1/jobs", params={"limit": "2", "created_before": str(created[4])})).json()
        rest = await ids(cursor=page["next_cursor"], created_before=str(created[4]))
        assert [accepted.index(job["id"]) for job in page["jobs"]] + rest == [3, 2, 1, 0]
        for name, value in [("kind", "sing"), ("created_from", "nan"), ("created_before", "-1"), ("created_from", "x")]:
            reply = await http.get("/v1/jobs", params={name: value})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, name), value


async def test_expired_jobs_leave_the_list_and_its_key_in_redis(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        first = (await http.post("/v1/jobs/bulk", json=[score()] * 50)).json()
        redis.delete(*(f"rq:job:{job['id']}" for job in first))
        assert (await http.get("/v1/jobs")).json()["jobs"] == []
        for _ in range(4):
            await http.post("/v1/jobs/bulk", json=[score()] * 50)
    assert redis.zcard(store.Keys.jobs_of("local")) < 250


async def test_models_lists_what_each_live_worker_serves(serving: Serving, worker: FakeWorker, redis: Redis):
    FakeWorker(redis, name="w2").register()
    FakeWorker(redis, model="another", name="w3").register()
    FakeWorker(redis, name="w4").register()
    redis.delete(store.Keys.served_model("w4"))
    async with serving() as http:
        models = (await http.get("/v1/models")).json()["models"]

    assert [(card["id"], card["worker"]) for card in models] == [("another", "w3"), ("demo", "w1"), ("demo", "w2")]
    assert models[1]["stamp"]["fingerprint"]
    assert models[1]["self_test"] == "passed"
    assert (models[1]["context_length"], models[1]["vocab_size"]) == (64, 1000)


async def test_a_model_is_accepted_as_soon_as_its_worker_is_live(serving: Serving, redis: Redis):
    async with serving() as http:
        refused = await http.post("/v1/jobs", json=score())
        FakeWorker(redis).register()
        accepted = await http.post("/v1/jobs", json=score())

    assert (refused.status_code, accepted.status_code) == (404, 202)
    assert refused.json()["error"]["field"] == "model"
    assert "no worker is live" in refused.json()["error"]["message"]


async def test_a_filter_finds_a_few_jobs_among_many(serving: Serving, redis: Redis):
    """A finished job without an outcome has failed, and so has one that no worker holds after its `expires_at`."""
    rare = {
        "failed": {"status": "failed"},
        "lost": {"status": "finished"},
        "expired": {"status": "queued", "expires_at": "1.5"},
        "left behind": {"status": "started", "expires_at": "1.5"},
        "of a later release": {"status": "dancing"},
        "waiting": {"status": "queued"},
        "running": {"status": "started"},
        "of another model": {"status": "finished", "model": "other"},
        "a generation": {"status": "finished", "kind": "generate"},
    }
    ids = {name: f"{number:032x}" for number, name in enumerate(rare)}
    with redis.pipeline(transaction=False) as pipeline:
        for number in range(MAX_SLICES * SLICE_SIZE // 10):
            add_job(pipeline, f"{number + 1000:032x}", 2_000_000.0 + number, {"status": "finished"}, has_outcome=True)
        for number, (name, fields) in enumerate(rare.items()):
            add_job(
                pipeline,
                ids[name],
                1_000_000.0 + number,
                fields,
                has_outcome=name in ("of another model", "a generation"),
            )
        pipeline.set(store.RqKeys.job("f" * 32), "a string")
        pipeline.zadd(store.Keys.jobs_of("local"), {"f" * 32: 1.0})
        pipeline.execute()

    async with serving() as http:
        for query, names in [
            ("status=failed", ["of a later release", "left behind", "expired", "lost", "failed"]),
            ("status=queued", ["waiting"]),
            ("status=started", ["running"]),
            ("model=other", ["of another model"]),
            ("kind=generate&status=finished", ["a generation"]),
            ("status=canceled", []),
        ]:
            page = (await http.get(f"/v1/jobs?{query}")).json()
            assert [job["id"] for job in page["jobs"]] == [ids[name] for name in names]
            assert page.get("next_cursor") is None
        by_two = [job["id"] async for page in pages(http, "/v1/jobs?status=failed&limit=2") for job in page["jobs"]]
        assert by_two == [ids[name] for name in ["of a later release", "left behind", "expired", "lost", "failed"]]


def add_job(pipeline: Pipeline, job_id: str, created_at: float, fields: dict[str, str], has_outcome: bool) -> None:
    """Write a job as Redis holds it when it is listed."""
    known = {"owner": "local", "model": "demo", "kind": "score", "created": str(created_at)}
    pipeline.hset(store.RqKeys.job(job_id), mapping=known | fields)
    pipeline.zadd(store.Keys.jobs_of("local"), {job_id: created_at})
    if has_outcome:
        pipeline.set(store.Keys.outcome(job_id), b"")


async def pages(http: httpx.AsyncClient, path: str) -> AsyncIterator[dict[str, Any]]:
    """Yield the pages of a list."""
    cursor = ""
    while cursor is not None:
        page = (await http.get(path + cursor)).json()
        yield page
        cursor = None if page["next_cursor"] is None else f"&cursor={page['next_cursor']}"
