"""One key cannot fill Redis: its jobs, results and files are bounded in number and in bytes, and others go on."""

import asyncio
import os
from collections.abc import Iterator

import httpx
import pytest
from redis import Redis
from rq.queue import Queue

from scorepool import store, wire
from scorepool.api.repositories.webhook_endpoints import MAX_ENDPOINTS
from scorepool.store.scripts import load
from scorepool.worker.claims.leases import Claim, Leases
from tests.api.conftest import ALICE, BOB, KEYS, Serving, bearer, eventually, generate
from tests.api.fake_worker import COMPLETED, FakeWorker

pytestmark = pytest.mark.anyio
LIMIT_BYTES = 300_000
LINE = (
    b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{"model":"demo","prompt":"a","max_tokens":2}}\n'
)


async def submit(http: httpx.AsyncClient, key: str, **changes: object) -> httpx.Response:
    return await http.post("/v1/jobs", json=generate(prompt="a" * 10_000, max_tokens=8) | changes, headers=bearer(key))


async def fill(http: httpx.AsyncClient, key: str) -> tuple[list[str], httpx.Response]:
    """Submit jobs until one is refused. Return the ids of the others, and the refusal."""
    ids = []
    while (reply := await submit(http, key)).status_code == 202:
        ids.append(reply.json()["id"])
    return ids, reply


async def upload(http: httpx.AsyncClient, key: str, data: bytes) -> httpx.Response:
    return await http.post("/v1/files", files={"file": ("f", data)}, data={"purpose": "batch"}, headers=bearer(key))


def end_all(redis: Redis, outcome: wire.Result) -> int:
    """Claim every waiting job of `demo` and record its result, as a worker does. Return how many there were."""
    queues = [Queue(name, connection=redis) for name in store.queue_names("demo")]
    finish, num_ended = redis.register_script(load("finish.lua")), 0
    leases = Leases(redis, "w1", store.RqKeys.worker("w1"), 20.0)
    while jobs := leases.claim(queues, Claim(max_jobs=64, num_in_flight=0, max_in_flight=64)).jobs:
        for job in jobs:
            details = [job.lease_key, 0, wire.encode(outcome), 100, 0.1, 2, "ended_at", "", 2, "type", "1"]
            wip = job.queue.started_job_registry.key
            answers, _ = finish(keys=[wip], args=["rq:worker:w1", "idle", "", *details])
            num_ended += answers == [b"recorded"]
    return num_ended


def let_a_minute_pass(redis: Redis, owner: str) -> None:
    """Delete the owner's jobs that would expire in a minute."""
    for job_id in redis.zrange(store.Keys.ledger_of(owner), 0, -1):
        key = store.RqKeys.job(job_id.decode())
        if 0 <= redis.ttl(key) <= 60:
            redis.delete(key)
            redis.zadd(store.Keys.ledger_of(owner), {job_id: 0})


def used_bytes(redis: Redis, owner: str) -> int:
    return int(redis.hget(store.Keys.sizes_of(owner), "total") or 0)


@pytest.fixture
def maxmemory(redis: Redis) -> Iterator[int]:
    """Limit the session's Redis to 64 MiB beyond what it uses."""
    most = int(redis.info("memory")["used_memory"]) + 64 * 2**20
    redis.config_set("maxmemory", most)
    yield most
    redis.config_set("maxmemory", 0)


async def test_a_key_is_refused_at_its_limit_and_another_key_s_jobs_are_accepted_and_end(
    serving: Serving, redis: Redis, worker: FakeWorker
):
    async with serving(api_keys=KEYS, max_bytes_per_key=LIMIT_BYTES) as http:
        attack = asyncio.gather(*(submit(http, ALICE) for _ in range(100)))
        bobs = [await submit(http, BOB) for _ in range(10)]
        refused = [reply for reply in await attack if reply.status_code != 202]
        assert [reply.status_code for reply in bobs] == [202] * 10
        assert 100 - LIMIT_BYTES // 10_000 <= len(refused) < 100
        assert used_bytes(redis, "alice") <= LIMIT_BYTES
        error = refused[0].json()["error"]
        assert (refused[0].status_code, error["code"]) == (429, "queue_full")
        assert 1 <= int(refused[0].headers["retry-after"]) <= 3600
        assert "SCOREPOOL_MAX_BYTES_PER_KEY" in error["message"]
        assert "DELETE /v1/jobs/{id}" in error["message"]

        assert end_all(redis, COMPLETED) == 10 + 100 - len(refused)
        for reply in bobs:
            job = (await http.get(f"/v1/jobs/{reply.json()['id']}", headers=bearer(BOB))).json()
            assert job["status"] == "finished"


async def test_every_result_is_recorded_beyond_the_limit_and_new_jobs_wait_until_some_are_gone(
    serving: Serving, redis: Redis, worker: FakeWorker
):
    text = "word" * 20_000
    large = wire.Result(
        sequences=[wire.SequenceResult(token_ids=[1], token_bytes=[text.encode()], text=text, finish_reason="stop")],
        temperature=1.0,
        usage=wire.Usage(prompt_tokens=1, completion_tokens=1),
        stamp=COMPLETED.stamp,
    )
    async with serving(api_keys=KEYS, max_bytes_per_key=LIMIT_BYTES) as http:
        ids, _ = await fill(http, ALICE)
        assert end_all(redis, large) == len(ids)  # larger than any estimate
        assert used_bytes(redis, "alice") > 2 * LIMIT_BYTES
        for job_id in ids:
            job = (await http.get(f"/v1/jobs/{job_id}", headers=bearer(ALICE))).json()
            assert job["result"]["sequences"][0]["text"] == text
        assert (await submit(http, ALICE)).status_code == 429
        for job_id in ids[:-1]:
            assert (await http.delete(f"/v1/jobs/{job_id}", headers=bearer(ALICE))).status_code == 204
        assert (await submit(http, ALICE)).status_code == 202


async def test_results_that_expire_make_room_without_any_command(serving: Serving, redis: Redis, worker: FakeWorker):
    async with serving(api_keys=KEYS, max_bytes_per_key=LIMIT_BYTES) as http:
        ids, _ = await fill(http, ALICE)
        end_all(redis, COMPLETED)
        before = used_bytes(redis, "alice")
        redis.delete(*map(store.RqKeys.job, ids), *map(store.Keys.outcome, ids))  # as Redis does after their time
        redis.zadd(store.Keys.ledger_of("alice"), dict.fromkeys(ids, 0))
        assert used_bytes(redis, "alice") == before
        assert (await submit(http, ALICE)).status_code == 202
    assert len(redis.zrange(store.Keys.ledger_of("alice"), 0, -1)) == 1


async def test_canceled_jobs_and_repeated_submissions_count_as_what_they_are(
    serving: Serving, redis: Redis, worker: FakeWorker
):
    async with serving(api_keys=KEYS, max_bytes_per_key=LIMIT_BYTES) as http:
        key = {"Idempotency-Key": "order"} | bearer(ALICE)
        body = generate(prompt="a" * 10_000)
        first = await http.post("/v1/jobs", json=body, headers=key)
        ids, _ = await fill(http, ALICE)
        again = await http.post("/v1/jobs", json=body, headers=key)
        assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
        for job_id in ids:
            assert (await http.post(f"/v1/jobs/{job_id}/cancel", headers=bearer(ALICE))).status_code == 200
        assert used_bytes(redis, "alice") < len(ids) * 3000 + 20_000
        assert (await submit(http, ALICE)).status_code == 202


async def test_the_number_of_jobs_is_bounded(serving: Serving, worker: FakeWorker):
    async with serving(api_keys=KEYS, max_jobs_per_key=5) as http:
        ids, refused = await fill(http, ALICE)
        bulk = await http.post("/v1/jobs/bulk", json=[generate()] * 6, headers=bearer(BOB))
        whole = await http.post("/v1/jobs/bulk", json=[generate()] * 5, headers=bearer(BOB))
    assert (len(ids), refused.status_code, bulk.status_code, whole.status_code) == (5, 429, 413, 202)
    assert "SCOREPOOL_MAX_JOBS_PER_KEY" in refused.json()["error"]["message"]


async def test_a_result_is_counted_before_it_is_there(serving: Serving, redis: Redis, maxmemory: int):
    """By default a key of several may have half of Redis's memory; the only key may have all."""
    FakeWorker(redis).register(context_length=200_000)
    huge = generate(max_tokens=100_000, top_logprobs=40)
    async with serving(api_keys=KEYS) as http:
        refused = await http.post("/v1/jobs", json=huge, headers=bearer(ALICE))
        assert (refused.status_code, str(maxmemory // 2) in refused.json()["error"]["message"]) == (413, True)
        assert (await submit(http, ALICE)).status_code == 202
    async with serving(api_keys=KEYS.partition(",")[0]) as http:
        assert (await http.post("/v1/jobs", json=huge, headers=bearer(ALICE))).status_code == 202


async def test_files_are_counted_and_a_refused_one_leaves_nothing(serving: Serving, redis: Redis, worker: FakeWorker):
    async with serving(api_keys=KEYS, max_bytes_per_key=2**20) as http:
        accepted = [await upload(http, ALICE, os.urandom(400_000)) for _ in range(2)]
        before = set(redis.scan_iter("scorepool:file:*"))
        refused = await upload(http, ALICE, os.urandom(400_000))
        assert [reply.status_code for reply in (*accepted, refused)] == [200, 200, 429]
        assert set(redis.scan_iter("scorepool:file:*")) == before
        assert (await upload(http, BOB, os.urandom(400_000))).status_code == 200
        await http.delete(f"/v1/files/{accepted[0].json()['id']}", headers=bearer(ALICE))
        assert (await upload(http, ALICE, os.urandom(400_000))).status_code == 200


async def test_a_chunk_that_is_sent_again_counts_once(serving: Serving, redis: Redis):
    """The API's connection repeats a command whose reply was lost."""
    store_chunk = redis.register_script(load("store_chunk.lua"))
    async with serving(api_keys=KEYS, max_bytes_per_key=2**20) as http:
        file_id = (await upload(http, ALICE, b"[1]\n" * 1000)).json()["id"]
        before = used_bytes(redis, "alice")
        chunk = redis.hget(store.Keys.file_parts(file_id), "0")
        answer = store_chunk(args=["alice", file_id, 0, chunk, 60, 2**20])

    assert (answer, used_bytes(redis, "alice")) == ([b"stored"], before)


async def test_a_batch_waits_for_room_and_loses_no_line(serving: Serving, redis: Redis, worker: FakeWorker):
    async with serving(api_keys=KEYS, max_bytes_per_key=60_000) as http:
        lines = b"".join(LINE % index for index in range(40))
        file = (await upload(http, ALICE, lines)).json()["id"]
        create = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await http.post("/v1/batches", json=create, headers=bearer(ALICE))).json()["id"]
        num_ended, shown = 0, {}
        async with asyncio.timeout(60):
            while shown.get("status") != "completed":
                num_ended += end_all(redis, COMPLETED)
                let_a_minute_pass(redis, "alice")
                await asyncio.sleep(0.02)
                shown = (await http.get(f"/v1/batches/{batch}", headers=bearer(ALICE))).json()
        assert shown["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert num_ended == 40
        assert (await submit(http, BOB)).status_code == 202
        output = (await http.get(f"/v1/files/{shown['output_file_id']}/content", headers=bearer(ALICE))).text
        assert len(output.splitlines()) == 40
        assert redis.hget(store.Keys.sizes_of("alice"), shown["output_file_id"]) is not None
        await eventually(lambda: not redis.exists(store.Keys.batch_lines(batch)))


async def test_endpoints_that_are_registered_after_the_jobs_count_with_the_deliveries_that_these_make(
    serving: Serving, redis: Redis, worker: FakeWorker
):
    async with serving(api_keys=KEYS, max_bytes_per_key=LIMIT_BYTES) as http:
        ids = [(await submit(http, ALICE, prompt="a")).json()["id"] for _ in range(40)]
        replies = [
            await http.post("/v1/webhooks/endpoints", json={"url": "https://hooks.example/"}, headers=bearer(ALICE))
            for _ in range(5)
        ]
        assert [reply.status_code for reply in replies] == [201, 201, 409, 409, 409]
        for job_id in ids:
            assert (await http.post(f"/v1/jobs/{job_id}/cancel", headers=bearer(ALICE))).status_code == 200
        assert redis.zcard(store.Keys.deliveries_of("alice")) == 80
        reserved = [reply.json()["endpoint"]["id"] for reply in replies[:2]]
        sizes = map(int, redis.hmget(store.Keys.sizes_of("alice"), reserved))
        assert used_bytes(redis, "alice") - sum(sizes) <= LIMIT_BYTES


async def test_an_endpoint_counts_no_longer_than_it_is_registered(serving: Serving, redis: Redis, worker: FakeWorker):
    async with serving(api_keys=KEYS, max_bytes_per_key=2 * LIMIT_BYTES) as http:

        async def register() -> httpx.Response:
            body = {"url": "https://hooks.example/"}
            return await http.post("/v1/webhooks/endpoints", json=body, headers=bearer(ALICE))

        assert (await submit(http, ALICE, prompt="a")).status_code == 202
        before = used_bytes(redis, "alice")
        registered = [(await register()).json()["endpoint"]["id"] for _ in range(MAX_ENDPOINTS)]
        counted = used_bytes(redis, "alice")
        assert counted > before
        refused = await register()
        assert (refused.status_code, "which is the limit" in refused.text) == (409, True)
        assert used_bytes(redis, "alice") == counted
        for endpoint_id in registered:
            path = f"/v1/webhooks/endpoints/{endpoint_id}"
            assert (await http.delete(path, headers=bearer(ALICE))).status_code == 204
        assert used_bytes(redis, "alice") == before
