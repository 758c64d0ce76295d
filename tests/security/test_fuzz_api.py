"""Invalid data in any key that the API reads gives no 5xx, is reported as what it is, and hides no other job."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from redis import Redis
from rq.job import JobStatus

from scorepool import store, wire
from tests.api.conftest import Serving, eventually, score
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio
NUMERIC = wire.Failure(code="numeric", message="NaN")
SEED = 20_261_122
LINE = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"demo","prompt":"a"}}\n'
INVALID_VALUES = [
    *(b"\xff\xfe\x80nonsense", b"", b"-1", b"9" * 400, b"null", b"\x80\x04K\x01.", b"{}", b"[]", b"NaN", b"inf"),
    *(b"\x91\x91", b"\x80", b"0", b"a b"),
]
PREFIXES = (b"rq:job:", b"scorepool:outcome:", b"scorepool:card:", b"scorepool:file:", b"scorepool:batch:")
Routes = list[tuple[str, str, Any]]  # method, path, JSON body


async def fill(http: httpx.AsyncClient, redis: Redis, worker: FakeWorker) -> Routes:
    """Create one object of each kind. Return every route that reads and then every one that writes, with their ids."""
    made = await http.post("/v1/webhooks/endpoints", json={"url": "https://a.example/"})
    endpoint = made.json()["endpoint"]["id"]
    body = score(webhook="https://a.example/")
    queued, finished, failed = [(await http.post("/v1/jobs", json=body)).json()["id"] for _ in range(3)]
    worker.end(finished)
    worker.end(failed, NUMERIC, JobStatus.FAILED)
    delivery = store.Keys.delivery(finished)
    worker.fail_delivery(delivery)
    upload = {"files": {"file": ("f.jsonl", LINE)}, "data": {"purpose": "batch"}}
    file = (await http.post("/v1/files", **upload)).json()["id"]
    create = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = (await http.post("/v1/batches", json=create)).json()["id"]
    await eventually(lambda: redis.llen("rq:queue:demo:low"))  # the job of its line

    jobs = [f"/v1/jobs/{job_id}" for job_id in (queued, finished, failed)]
    read = [
        *jobs,
        f"{jobs[1]}/events",
        f"/v1/jobs/ended?ids={finished},{failed},{queued}",
        "/v1/jobs",
        "/v1/models",
        "/v1/scorepool/models/demo",
        "/tokenizer_info",
        "/readyz",
    ]
    read += ["/metrics", "/v1/webhooks/endpoints", f"/v1/webhooks/endpoints/{endpoint}", "/v1/webhooks/deliveries"]
    read += [f"/v1/webhooks/deliveries/{delivery}", "/v1/files", f"/v1/files/{file}", f"/v1/files/{file}/content"]
    read += ["/v1/batches", f"/v1/batches/{batch}"]
    params = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    many = {"requests": [{"custom_id": "a", "params": params}]}
    messages = f"/v1/messages/batches/{(await http.post('/v1/messages/batches', json=many)).json()['id']}"
    read += ["/v1/messages/batches", messages]
    asked = {"model": "demo", "input": "a", "background": True}
    responses = [f"/v1/responses/{(await http.post('/v1/responses', json=asked)).json()['id']}" for _ in range(2)]
    worker.end(responses[0].rpartition("_")[2])
    read += responses
    write = [
        ("PATCH", f"/v1/webhooks/endpoints/{endpoint}", {"description": "x"}),
        ("POST", f"/v1/webhooks/endpoints/{endpoint}/secret", None),
        ("POST", "/v1/webhooks/test", {"endpoint_id": endpoint}),
        ("POST", f"/v1/webhooks/deliveries/{delivery}/replay", None),
        ("POST", "/v1/webhooks/deliveries/replay", {"since": 0}),
        ("POST", "/v1/batches", create),
        ("POST", f"/v1/batches/{batch}/cancel", None),
        ("GET", f"{messages}/results", None),
        ("POST", f"{messages}/cancel", None),
        ("DELETE", messages, None),
        *(("POST", f"{path}/cancel", None) for path in responses),
        ("POST", "/v1/responses", {"model": "demo", "input": "a", "previous_response_id": responses[0][-37:]}),
        ("DELETE", responses[0], None),
        ("POST", "/v1/jobs", score()),
        *(("POST", f"{job}/cancel", None) for job in jobs),
        *(("DELETE", path, None) for path in (*jobs, f"/v1/files/{file}", f"/v1/webhooks/endpoints/{endpoint}")),
    ]
    return [("GET", path, None) for path in read] + write


def mutations(redis: Redis, key: bytes, values: list[bytes]) -> Iterator[Callable[[], object]]:
    """Yield calls that each write one invalid value into a key."""
    match redis.type(key):
        case b"string":
            yield from (lambda value=value: redis.set(key, value) for value in values)
        case b"hash":
            for field in redis.hkeys(key):
                yield lambda field=field: redis.hdel(key, field)
                yield from (lambda field=field, value=value: redis.hset(key, field, value) for value in values)
        case b"zset":
            member = redis.zrange(key, 0, 0)[0]
            yield from (lambda at=at: redis.zadd(key, {member: at}) for at in (1e300, float("inf"), float("-inf")))
            yield from (lambda value=value: redis.zadd(key, {value: 1e300}) for value in values)
        case b"set":
            yield from (lambda value=value: redis.sadd(key, value) for value in values)
        case b"list":
            yield from (lambda value=value: redis.lpush(key, value) for value in values)


async def find_faults(http: httpx.AsyncClient, routes: Routes) -> list[tuple[str, str, str]]:
    """Return the requests that get a 5xx, and the GET requests that get a 400 although they are valid."""
    faults = []
    for method, path, body in routes:
        reply = await (http.request(method, path, json=body) if body else http.request(method, path))
        if reply.status_code >= 500 or (method == "GET" and reply.status_code == 400):
            faults.append((method, path, reply.text[:200]))
    return faults


@pytest.fixture
def restore(redis: Redis, worker: FakeWorker) -> Callable[[dict[bytes, bytes]], Awaitable[None]]:
    async def restore(dump: dict[bytes, bytes]) -> None:
        """Replace the database by the dumped keys."""
        redis.flushdb()
        with redis.pipeline() as pipeline:
            for key, value in dump.items():
                pipeline.restore(key, 0, value)
            pipeline.execute()
        worker.register()

    return restore


def dump_keys(redis: Redis) -> dict[bytes, bytes]:
    return {key: value for key in sorted(redis.scan_iter()) if (value := redis.dump(key)) is not None}


@pytest.mark.parametrize(
    "is_thorough", [False, pytest.param(True, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
async def test_invalid_data_in_any_field_of_any_key_gives_no_5xx(
    serving: Serving, redis: Redis, worker: FakeWorker, restore: Any, is_thorough: bool
):
    async with serving(max_wait_s=0.01) as http:
        routes = await fill(http, redis, worker)
        if not is_thorough:
            routes = [route for route in routes if route[0] == "GET"]
        dump = dump_keys(redis)
        mutations_by_key = [(key, mutate) for key in dump for mutate in mutations(redis, key, INVALID_VALUES)]
        for key, mutate in mutations_by_key if is_thorough else random.Random(SEED).sample(mutations_by_key, 40):
            mutate()
            assert await find_faults(http, routes) == [], (key, mutate.__defaults__)
            await restore(dump)


async def test_a_key_of_a_wrong_redis_type_hides_no_other(
    serving: Serving, redis: Redis, worker: FakeWorker, restore: Any
):
    async with serving(max_wait_s=0.01) as http:
        routes = [route for route in await fill(http, redis, worker) if route[0] == "GET"]
        dump = dump_keys(redis)
        for key in [key for key in dump if key.startswith(PREFIXES)]:
            is_hash = redis.type(key) == b"hash"
            redis.delete(key)
            redis.set(key, "x") if is_hash else redis.hset(key, "x", "y")
            assert await find_faults(http, routes) == [], key
            await restore(dump)


async def test_an_unreadable_job_is_reported_as_failed_and_hides_no_other(
    serving: Serving, redis: Redis, worker: FakeWorker
):
    async with serving() as http:
        good, *bad = [job["id"] for job in (await http.post("/v1/jobs/bulk", json=[score()] * 6)).json()]
        for job_id, field in zip(bad, ("status", "kind", "created", "ended_at", "model"), strict=True):
            worker.end(job_id)
            redis.hset(f"rq:job:{job_id}", field, b"\xffnonsense")
        redis.delete(store.Keys.outcome(bad[0]))
        listed = {job["id"]: job for job in (await http.get("/v1/jobs")).json()["jobs"]}
        jobs = [(await http.get(f"/v1/jobs/{job_id}")).json() for job_id in bad]

    assert list(listed) == [*reversed(bad), good]
    assert jobs[0]["status"] == listed[bad[0]]["status"] == "failed"
    assert jobs[0]["failure"]["code"] == "internal"
    assert "cannot be read" in jobs[0]["failure"]["message"]
    assert [job["status"] for job in jobs[1:]] == ["finished"] * 4  # their readable fields are reported
    assert all(job["result"]["sequences"] for job in jobs[1:])
    assert (jobs[1]["kind"], jobs[2]["created_at"], jobs[3]["ended_at"]) == (None, None, None)


@pytest.mark.parametrize(
    "outcome", [b"", b"\xff", b"\x80", wire.encode({"type": "failure", "code": "of a later version"})]
)
async def test_an_unreadable_outcome_is_reported_as_a_failure(
    serving: Serving, redis: Redis, worker: FakeWorker, outcome: bytes
):
    async with serving() as http:
        job_id = (await http.post("/v1/jobs", json=score())).json()["id"]
        worker.end(job_id)
        redis.set(store.Keys.outcome(job_id), outcome)
        job = (await http.get(f"/v1/jobs/{job_id}?wait=5")).json()
        events = (await http.get(f"/v1/jobs/{job_id}/events")).text

    assert (job["status"], job["failure"]["code"]) == ("failed", "internal")
    assert "the queue's record of its end cannot be read" in job["failure"]["message"]
    assert '"status":"failed"' in events


async def test_the_openai_api_reports_an_unreadable_outcome_as_a_failed_job(
    serving: Serving, redis: Redis, worker: FakeWorker
):
    """The status is one that the SDK retries, because the next job may succeed."""
    async with serving() as http:
        request = asyncio.create_task(http.post("/v1/completions", json={"model": "demo", "prompt": "a"}))
        await eventually(worker.waiting)
        [job_id] = worker.waiting()
        redis.lrem("rq:queue:demo", 1, job_id)
        redis.hset(f"rq:job:{job_id}", "status", "finished")
        redis.set(store.Keys.outcome(job_id), b"\xff")
        redis.xadd(store.DONE, {"id": job_id})
        reply = await request

    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (500, "job_failed", "server_error")
    assert "cannot be read" in error["message"]


async def test_an_unreadable_worker_registration_does_not_hide_the_other_workers(
    serving: Serving, redis: Redis, worker: FakeWorker
):
    """A worker of another version may write such a registration."""
    redis.zadd(store.Keys.models, {"w0": 1e11, b"\xff": 1e11})
    redis.set(store.Keys.served_model("w0"), wire.encode({"id": "demo", "of": "another version"}))
    async with serving() as http:
        assert (await http.post("/v1/jobs", json=score())).status_code == 202
        assert [card["worker"] for card in (await http.get("/v1/models")).json()["models"]] == ["w1"]
        ready = await http.get("/readyz")
        for _ in range(3000):  # until the reader of ended jobs is connected
            if ready.status_code == 200:
                break
            await asyncio.sleep(0.01)
            ready = await http.get("/readyz")
        assert ready.status_code == 200
