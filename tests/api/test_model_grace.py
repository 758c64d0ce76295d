"""A model whose last worker has just gone is still accepted: its requests wait for a worker, or get 503, never 404."""

import asyncio
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from redis import Redis

from scorepool import store, wire
from scorepool.worker.inference.registration import WorkerRegistration
from scorepool.worker.rq.sweep import Sweep
from tests.api.conftest import Serving, generate, score
from tests.api.conftest import eventually as in_redis
from tests.api.fake_worker import COMPLETED, FakeWorker
from tests.api.test_process import eventually, running
from tests.worker.conftest import Workers, workers  # noqa: F401 - a fixture

LINE = '{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"nick","prompt":"a","max_tokens":2}}\n'
LINK = wire.WorkerLink(lease_s=1.0)


@pytest.fixture
def gone(redis: Redis) -> FakeWorker:
    """The worker of `demo`, alias `nick`, that has just stopped."""
    worker = FakeWorker(redis)
    worker.register(aliases=["nick"], grace_s=100)
    worker.unregister()
    return worker


@pytest.mark.anyio
async def test_jobs_for_a_recent_model_are_queued_under_its_own_name(serving: Serving, gone: FakeWorker):
    async with serving() as http:
        replies = [await http.post("/v1/jobs", json=score(model=name)) for name in ("demo", "nick")]
        refused = await http.post("/v1/jobs", json=generate(prompt=[1000]))
        listed = (await http.get("/v1/models")).json()["data"]

    assert [reply.status_code for reply in replies] == [202, 202]
    assert gone.waiting() == {reply.json()["id"] for reply in replies}
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "prompt[0]")  # checked as if it were live
    assert listed == []


@pytest.mark.anyio
async def test_a_synchronous_request_waits_for_the_worker_to_come_back(serving: Serving, gone: FakeWorker):
    async with serving() as http:
        for path, body in [
            ("/v1/completions", {"model": "nick", "prompt": "a"}),
            ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}}),
        ]:
            asking = asyncio.create_task(http.post(path, json=body))
            await in_redis(gone.waiting)
            [job_id] = gone.waiting()
            gone.end(job_id, COMPLETED)
            assert (await asking).status_code == 200, path


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_synchronous_request_gets_503_with_retry_after_if_no_worker_comes(
    serving: Serving, gone: FakeWorker, stream: bool
):
    async with serving(max_wait_s=0.2) as http:
        sdk = AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="x", http_client=http, max_retries=0)
        with pytest.raises(openai.InternalServerError, match="no live worker serves 'demo'") as refused:
            await sdk.completions.create(model="nick", prompt="a", stream=stream)
        assert gone.waiting() == set()

    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) >= 1


@pytest.mark.anyio
async def test_a_batch_for_a_recent_model_is_not_failed(serving: Serving, gone: FakeWorker):
    async with serving() as http:
        file = await http.post("/v1/files", files={"file": ("a.jsonl", LINE)}, data={"purpose": "batch"})
        body = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = (await http.post("/v1/batches", json=body)).json()["id"]
        await in_redis(gone.waiting)
        batch = (await http.get(f"/v1/batches/{batch_id}")).json()

    assert (batch["status"], batch["errors"]) == ("in_progress", None)


@pytest.mark.anyio
async def test_after_the_grace_time_the_model_is_404_with_the_names_and_aliases_that_are_served(
    serving: Serving, gone: FakeWorker, redis: Redis
):
    other = FakeWorker(redis, model="other", name="w2")
    other.register(aliases=["gpt-4", "o"])
    redis.delete(store.Keys.recent_model("demo"))
    async with serving() as http:
        refused = await http.post("/v1/jobs", json=score())

    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_served")
    assert "live models: other, gpt-4, o." in refused.json()["error"]["message"]


@pytest.mark.parametrize("grace_s", [0, 100])
def test_a_worker_that_stops_leaves_its_model_behind_for_the_grace_time(redis: Redis, grace_s: int):
    worker = FakeWorker(redis)
    worker.register()
    registration = WorkerRegistration(worker.card, lambda: LINK, model_grace_s=grace_s)
    with redis.pipeline() as pipeline:
        registration.renew(pipeline)
        registration.remove(pipeline)
        pipeline.execute()

    left = redis.keys("*")
    assert len(left) == (2 if grace_s else 0)
    for key in left:
        assert 0 < redis.ttl(key) <= grace_s


def test_a_model_stays_recent_whatever_the_clocks_of_workers_say(redis: Redis):
    """The clock of demo's worker is behind; the name `gone` has no key any more."""
    redis.set(store.Keys.recent_model("demo"), b"card", ex=600)
    redis.zadd(store.Keys.recent_models, {"demo": time.time() - 3600, "gone": time.time()})
    other = FakeWorker(redis, model="other", name="w2")
    other.register()

    with redis.pipeline() as pipeline:
        WorkerRegistration(other.card, lambda: LINK, model_grace_s=600).renew(pipeline)
        pipeline.execute()
    Sweep(redis, ["demo"], 60).run()

    assert set(redis.zrange(store.Keys.recent_models, 0, -1)) == {b"demo", b"other"}


def test_a_request_during_the_restart_of_the_only_worker_is_answered(
    workers: Workers,  # noqa: F811
    redis_url: str,
    root: Path,
    tmp_path: Path,
):
    """Worker killed, request during the gap, worker back, answer arrives. Real processes."""
    with running(root, redis_url, tmp_path / "api.log") as (http, _):
        killed = workers.start("--name", "first", SCOREPOOL_MODEL="demo,nick=fake")
        eventually(lambda: bool(http.get("/v1/models").json()["data"]))
        killed.kill()
        killed.wait()
        eventually(lambda: http.get("/v1/models").json()["data"] == [])
        replies: list[httpx.Response] = []
        body = {"model": "nick", "prompt": "hello", "max_tokens": 2}
        asking = threading.Thread(target=lambda: replies.append(http.post("/v1/completions", json=body)))
        asking.start()
        eventually(lambda: "scorepool_clients_waiting 1.0" in http.get("/metrics").text)
        workers.start("--name", "second", SCOREPOOL_MODEL="demo,nick=fake")
        asking.join()

    assert (replies[0].status_code, replies[0].json()["model"]) == (200, "nick")
