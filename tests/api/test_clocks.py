"""Redis's clock decides: an API process whose own clock is hours off accepts and expires the same jobs."""

import asyncio
import re
import time
from datetime import UTC, datetime

import pytest
from redis import Redis

from scorepool import store
from scorepool.api.repositories.webhook_endpoints import ROTATION_S
from tests.api.conftest import Serving, eventually, score
from tests.api.fake_worker import COMPLETED, FakeWorker

HOUR_S = 3600
LINE = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"demo","prompt":"a"}}\n'
MESSAGES = [{"role": "user", "content": "a"}]
pytestmark = pytest.mark.anyio


@pytest.fixture(params=[HOUR_S, -HOUR_S], ids=["ahead", "behind"])
def right(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, worker: FakeWorker) -> float:
    """Return the right time, while the clock of this process is an hour off."""
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + request.param)
    return true_time()


async def test_a_future_time_is_accepted_and_a_past_one_refused(serving: Serving, right: float):
    async with serving() as http:
        coming = await http.post("/v1/jobs", json=score(expires_at=right + 60))
        gone = await http.post("/v1/jobs", json=score(expires_at=right - 1))
        job = (await http.get(f"/v1/jobs/{coming.json()['id']}")).json()
    assert (coming.status_code, gone.status_code) == (202, 400)
    assert job["created_at"] == pytest.approx(right, abs=60)


async def test_a_job_that_no_worker_takes_in_time_is_shown_as_expired(
    serving: Serving, worker: FakeWorker, redis: Redis, right: float
):
    """No worker is there to fail it, so the API says so, by Redis's clock."""
    async with serving() as http:
        ids = [(await http.post("/v1/jobs", json=score(expires_at=right + 600))).json()["id"] for _ in range(3)]
        for job_id in ids[:2]:
            redis.hset(f"rq:job:{job_id}", "expires_at", str(right - 1))
        worker.start(ids[1], lease_s=60)  # a worker that runs a job fails it itself
        expired, running, queued = [(await http.get(f"/v1/jobs/{job_id}?wait=0")).json() for job_id in ids]
        listed = (await http.get("/v1/jobs?status=failed")).json()["jobs"]

    assert (expired["status"], expired["failure"]["code"]) == ("failed", "expired")
    assert expired["ended_at"] == pytest.approx(right - 1, abs=1)
    assert (running["status"], queued["status"]) == ("started", "queued")
    assert [job["id"] for job in listed] == [ids[0]]


async def test_a_client_that_waits_gets_its_job_when_it_expires_in_the_queue(
    serving: Serving, redis: Redis, right: float
):
    """No worker is there to end the job, so nothing but its time wakes the client."""
    async with serving() as http, asyncio.timeout(30):
        body = score(expires_at=redis_time(redis) + 1)  # by the right clock
        waited = await http.post("/v1/jobs", json=body, headers={"Prefer": "wait=60"})
        job_id = (await http.post("/v1/jobs", json=body | {"expires_at": redis_time(redis) + 1})).json()["id"]
        polled = await http.get(f"/v1/jobs/{job_id}?wait=60")
        answered_at = redis_time(redis)
    for reply in (waited, polled):
        assert (reply.status_code, reply.json()["status"]) == (200, "failed")
        assert reply.json()["failure"]["code"] == "expired"
    assert 0 <= answered_at - polled.json()["ended_at"] < 20


def redis_time(redis: Redis) -> float:
    seconds, microseconds = redis.time()
    return seconds + microseconds / 1e6


async def test_a_batch_runs_until_its_window_is_over(serving: Serving, redis: Redis, right: float):
    """Any API process may drive it, and their clocks may differ."""
    async with serving() as http:
        upload = {"files": {"file": ("f.jsonl", LINE)}, "data": {"purpose": "batch"}}
        file = (await http.post("/v1/files", **upload)).json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "30m"}
        batch = (await http.post("/v1/batches", json=body)).json()
        await eventually(lambda: redis.llen("rq:queue:demo:low"))
        due_at = redis.zscore(store.Keys.batches, batch["id"])
        running = (await http.get(f"/v1/batches/{batch['id']}")).json()
    assert batch["expires_at"] == pytest.approx(right + 1800, abs=60)
    assert due_at == pytest.approx(right, abs=60)
    assert running["status"] == "in_progress"


async def test_a_job_that_is_shown_as_expired_stays_so_when_it_is_canceled(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    async with serving() as http:
        id_ = (await http.post("/v1/jobs", json=score(expires_at=time.time() + 1000))).json()["id"]
        redis.hset(store.RqKeys.job(id_), "expires_at", time.time() - 2)
        before = (await http.get(f"/v1/jobs/{id_}")).json()
        canceled = await http.post(f"/v1/jobs/{id_}/cancel")
        after = (await http.get(f"/v1/jobs/{id_}")).json()

    assert canceled.status_code == 409
    assert "already failed" in canceled.json()["error"]["message"]
    assert before["status"] == after["status"] == "failed"
    assert before["failure"] == after["failure"]
    assert worker.waiting() == set()


async def test_a_job_that_is_shown_as_expired_can_be_deleted(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        id_ = (await http.post("/v1/jobs", json=score(expires_at=time.time() + 1000))).json()["id"]
        redis.hset(store.RqKeys.job(id_), "expires_at", time.time() - 2)
        deleted = await http.delete(f"/v1/jobs/{id_}")
        after = await http.get(f"/v1/jobs/{id_}")

    assert (deleted.status_code, after.status_code) == (204, 404)
    assert worker.waiting() == set()
    assert not redis.exists(store.Keys.request(id_), store.RqKeys.job(id_))


async def test_all_times_of_jobs_and_deliveries_are_by_the_clock_of_redis(
    serving: Serving, redis: Redis, worker: FakeWorker, right: float
):
    async with serving() as http:
        job_id = (await http.post("/v1/jobs", json=score(webhook="https://hooks.example/"))).json()["id"]
        assert (await http.post(f"/v1/jobs/{job_id}/cancel")).is_success
        endpoint = (await http.post("/v1/webhooks/endpoints", json={"url": "https://hooks.example/"})).json()
        path = f"/v1/webhooks/endpoints/{endpoint['endpoint']['id']}"
        to_test = {"endpoint_id": endpoint["endpoint"]["id"]}
        rotated = (await http.post(f"{path}/secret")).json()
        delivery = (await http.post("/v1/webhooks/test", json=to_test)).json()
        disabled = (await http.patch(path, json={"disabled": True})).json()
        worker.fail_delivery(delivery["id"])
        assert (await http.post(f"/v1/webhooks/deliveries/{delivery['id']}/replay")).is_success

    jobs = [store.RqKeys.job(job_id), store.RqKeys.job(store.Keys.delivery(job_id)), store.RqKeys.job(delivery["id"])]
    times = [redis.hget(job, field) for job in jobs for field in ("created_at", "enqueued_at", "ended_at", "at")]
    shown = [datetime.fromisoformat(text.decode()).timestamp() for text in times if text]
    shown += [float(redis.hget(jobs[2], "since")), endpoint["endpoint"]["created_at"], disabled["disabled_at"]]
    shown += [rotated["previous_expires_at"] - ROTATION_S]
    assert len(shown) >= 12
    assert shown == pytest.approx([redis_time(redis)] * len(shown), abs=30)


async def test_files_and_batches_show_the_time_of_redis(serving: Serving, redis: Redis, right: float):
    async with serving() as http:
        upload = {"files": {"file": ("f.jsonl", b"no line\n")}, "data": {"purpose": "batch"}}
        file = (await http.post("/v1/files", **upload)).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "30m"}
        batch_id = (await http.post("/v1/batches", json=body)).json()["id"]
        await eventually(lambda: redis.zcard(store.Keys.batches) == 0)
        batch = (await http.get(f"/v1/batches/{batch_id}")).json()

    shown = [file["created_at"], batch["created_at"], batch["failed_at"]]
    assert shown == pytest.approx([redis_time(redis)] * len(shown), abs=30)


async def test_the_ages_in_the_metrics_are_right(serving: Serving, redis: Redis, worker: FakeWorker, right: float):
    """An alert compares the age of heartbeats with 30 s."""
    redis.sadd("rq:workers:demo", "rq:worker:w1")
    redis.hset("rq:worker:w1", "last_heartbeat", datetime.fromtimestamp(redis_time(redis) - 40, UTC).isoformat())
    async with serving() as http:
        assert (await http.post("/v1/jobs", json=score())).is_success
        text = (await http.get("/metrics")).text

    [beat_age_s] = re.findall(r'scorepool_worker_heartbeat_age_seconds{model="demo"} (\S+)', text)
    [oldest_s] = re.findall(r'scorepool_queue_oldest_seconds{queue="demo"} (\S+)', text)
    assert 40 <= float(beat_age_s) < 70
    assert 0 <= float(oldest_s) < 30


@pytest.mark.parametrize("route", ["chat/completions", "completions", "completions?stream"])
async def test_openais_replies_show_the_time_of_redis(
    serving: Serving, redis: Redis, worker: FakeWorker, right: float, route: str
):
    """Ask a process that has just started, and has not read its models."""
    path, _, stream = route.partition("?")
    body = {"model": "demo", "prompt": "a"} if path == "completions" else {"model": "demo", "messages": MESSAGES}
    async with serving() as http:
        asking = asyncio.create_task(http.post(f"/v1/{path}", json=body | {"stream": bool(stream)}))
        await eventually(worker.waiting)
        [job_id] = worker.waiting()
        worker.end(job_id, COMPLETED)
        reply = await asking

    shown = [float(text) for text in re.findall(r'"created":(\d+)', reply.text)]
    assert shown
    assert shown == pytest.approx([redis_time(redis)] * len(shown), abs=30)
