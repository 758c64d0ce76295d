"""One server of two is down: its models answer 503, those of the other go on, and no job is lost."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from redis import Redis

from scorepool import wire
from scorepool.api.batches import advance, collect, start_lines
from scorepool.api.repositories.models import FRESH_S
from tests.api.batches.test_batches import jsonl, let_expire, lines_of, start, until
from tests.api.conftest import Serving, eventually, score
from tests.api.fake_worker import COMPLETED, FakeWorker
from tests.api.spread.conftest import OtherServer

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _up_again(other_server: OtherServer) -> Iterator[None]:
    yield
    if other_server.process.poll() is not None:
        other_server.start()


async def readiness(http: httpx.AsyncClient, is_whole: bool) -> list[str]:
    """Wait until all servers answer, or until not all do; return what is unavailable."""
    async with asyncio.timeout(60):
        while True:
            reply = await http.get("/readyz")
            if reply.status_code == 200 and ("unavailable" not in reply.json()) == is_whole:
                return list(reply.json().get("unavailable", []))
            await asyncio.sleep(0.02)


async def test_a_killed_server_keeps_only_its_models_from_working_and_loses_no_job(
    spread: Serving, worker: FakeWorker, big: FakeWorker, other_server: OtherServer
):
    async with spread() as http:
        await readiness(http, is_whole=True)
        accepted = (await http.post("/v1/jobs", json=score(model="big"))).json()["id"]
        waiting = asyncio.create_task(http.get(f"/v1/jobs/{accepted}?wait=60"))
        other_server.kill()
        assert await readiness(http, is_whole=False) == [
            "models big, large: the Redis of SCOREPOOL_REDIS_URLS['big'] does not answer"
        ]
        for model in ("big", "large"):
            for path, body in (("/v1/jobs", score(model=model)), ("/v1/completions", {"model": model, "prompt": "a"})):
                assert (await http.post(path, json=body)).status_code == 503
        assert (await http.get(f"/v1/jobs/{accepted}")).status_code == 503
        assert (await http.get("/v1/jobs")).status_code == 503  # a list without them would be wrong
        assert (await waiting).status_code == 503

        job_id = (await http.post("/v1/jobs", json=score(), headers={"Idempotency-Key": "k"})).json()["id"]
        reply = asyncio.create_task(http.get(f"/v1/jobs/{job_id}?wait=60"))
        await eventually(worker.waiting)
        worker.end(job_id)
        assert (await reply).json()["status"] == "finished"
        together = await http.get(f"/v1/jobs/ended?ids={job_id},{accepted}")
        assert [job["id"] for job in together.json()] == [job_id]
        await asyncio.sleep(FRESH_S)
        assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["demo"]
        metrics = ""
        while 'scorepool_queue_jobs{queue="demo",state="finished"} 1.0' not in metrics:  # one is used again for 3 s
            metrics = (await http.get("/metrics")).text
        assert "scorepool_redis_up 0.0" in metrics
        assert "scorepool_outcomes_total{" not in metrics  # a sum that falls and rises would count twice
        assert "The Redis of SCOREPOOL_REDIS_URLS[&#39;big&#39;] does not answer" in (await http.get("/")).text

        other_server.start()
        await readiness(http, is_whole=True)
        big.register(aliases=["large"])
        waiting = asyncio.create_task(http.get(f"/v1/jobs/{accepted}?wait=60"))
        await asyncio.sleep(0.1)
        big.end(accepted)
        assert (await waiting).json()["status"] == "finished"
        assert len((await http.get("/v1/jobs")).json()["jobs"]) == 2


async def test_home_may_be_down_too(
    spread: Serving, serving: Serving, worker: FakeWorker, big: FakeWorker, other_server: OtherServer, redis_url: str
):
    """Here the servers change places: `demo` is on the second, and home is killed."""
    async with serving(redis_url=other_server.url, redis_urls=f'{{"demo": "{redis_url}"}}') as http:
        await readiness(http, is_whole=True)
        other_server.kill()
        [unavailable] = await readiness(http, is_whole=False)
        assert unavailable.startswith("models that SCOREPOOL_REDIS_URLS does not name, files and batches: ")
        body = score(expires_at=4e9)
        job_id = (await http.post("/v1/jobs", json=body)).json()["id"]
        completion = asyncio.create_task(http.post("/v1/completions", json={"model": "demo", "prompt": "a"}))
        await eventually(lambda: len(worker.waiting()) == 2)
        worker.end(job_id)
        worker.end(worker.waiting().pop(), COMPLETED)
        assert (await http.get(f"/v1/jobs/{job_id}")).json()["status"] == "finished"
        assert (await completion).json()["choices"][0]["text"] == "b"
        assert (await http.post("/v1/jobs", json=score(model="big"))).status_code == 503
        assert (await http.get("/v1/batches")).status_code == 503
        compare = {"type": "compare", "model": "demo", "base": "demo", "items": body["items"]}
        compared = await http.post("/v1/jobs", json=compare, headers={"Idempotency-Key": "k"})
        assert compared.status_code == 202
        base_id = wire.base_job_id(compared.json()["id"])  # which names no server
        assert (await http.get(f"/v1/jobs/{base_id}")).json()["status"] == "queued"


async def test_a_server_that_hangs_delays_the_other_models_little(
    spread: Serving, worker: FakeWorker, big: FakeWorker, other: Redis, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("scorepool.api.server.REDIS_TIMEOUT_S", 0.5)
    pid = other.info("server")["process_id"]
    async with spread() as http:
        await readiness(http, is_whole=True)
        os.kill(pid, signal.SIGSTOP)
        try:
            await readiness(http, is_whole=False)
            async with asyncio.timeout(60):
                keys = [{}, {"Idempotency-Key": "k"}]
                replies = [await http.post("/v1/jobs", json=score(), headers=key) for key in keys]
            assert [reply.status_code for reply in replies] == [202] * 2
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(1.5)  # what was asked meanwhile is answered, and old
        await readiness(http, is_whole=True)
        assert (await http.post("/v1/jobs", json=score(model="big"))).status_code == 202
        await readiness(http, is_whole=True)


async def test_a_batch_has_lines_on_both_servers(
    spread: Serving, worker: FakeWorker, big: FakeWorker, redis: Redis, other: Redis, other_server: OtherServer
):
    """While one server is down, answers of the other are collected; its own lines are queued when it is back."""
    text = jsonl(2) + jsonl(2, model="large").replace(b'"custom_id": "', b'"custom_id": "large-')
    async with spread(lease_s=1.0) as http:
        batch_id = await start(http, text)
        await eventually(lambda: len(worker.waiting()) == len(big.waiting()) == 2)
        (first, second), (third, _) = sorted(worker.waiting()), sorted(big.waiting())
        big.end(third, COMPLETED)
        batch = await until(http, batch_id, lambda batch: batch["request_counts"]["completed"] == 1)
        await eventually(lambda: other.ttl(f"rq:job:{third}") <= 60)
        assert (await http.get(f"/v1/jobs/{third}")).json()["status"] == "finished"
        other_server.kill()
        worker.end(first, COMPLETED)
        worker.end(second, COMPLETED)
        batch = await until(http, batch_id, lambda batch: batch["request_counts"]["completed"] == 3)
        other_server.start()
        await eventually(big.waiting)
        big.end(big.waiting().pop(), COMPLETED)
        batch = await until(http, batch_id, lambda batch: batch["status"] == "completed")
        found = await lines_of(http, batch["output_file_id"])
    assert sorted(found) == ["1", "2", "large-1", "large-2"]
    assert {line["response"]["body"]["choices"][0]["text"] for line in found.values()} == {"b"}
    assert batch["request_counts"] == {"total": 4, "completed": 4, "failed": 0}


def named(name: str, model: str, **body: Any) -> bytes:
    """Return a line of a batch with this custom_id."""
    return jsonl(1, model=model, **body).replace(b'"custom_id": "1"', f'"custom_id": "{name}"'.encode())


async def test_a_batch_starts_the_lines_of_the_servers_that_answer(
    spread: Serving, worker: FakeWorker, big: FakeWorker, other_server: OtherServer
):
    """Those of the missing one are checked and queued when it is back."""
    text = named("a", "big") + named("b", "large", logprobs=3) + named("c", "demo") + named("d", "demo")
    async with spread(max_top_logprobs=2) as http:
        await readiness(http, is_whole=True)
        other_server.kill()
        await readiness(http, is_whole=False)
        batch_id = await start(http, text)
        await eventually(lambda: len(worker.waiting()) == 2)
        for job_id in worker.waiting():
            worker.end(job_id, COMPLETED)
        await until(http, batch_id, lambda batch: batch["request_counts"]["completed"] == 2)
        other_server.start()
        await eventually(big.waiting)
        big.end(big.waiting().pop(), COMPLETED)
        batch = await until(http, batch_id, lambda batch: batch["status"] == "completed")
        good, bad = [await lines_of(http, batch[name]) for name in ("output_file_id", "error_file_id")]
    assert (sorted(good), sorted(bad)) == (["a", "c", "d"], ["b"])
    assert "SCOREPOOL_MAX_TOP_LOGPROBS" in bad["b"]["response"]["body"]["error"]["message"]


@pytest.fixture
def two_lines_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let batches start two lines, and the next when both have ended."""
    monkeypatch.setattr(start_lines, "MAX_JOBS", 2)
    monkeypatch.setattr(start_lines, "MIN_JOBS", 1)


async def start_before_outage(
    http: httpx.AsyncClient, worker: FakeWorker, big: FakeWorker, other_server: OtherServer
) -> str:
    """Start a batch whose third line of four names an adapter of the other server, and kill that server."""
    big.register(adapters=[wire.ServedAdapter(name="sql", fingerprint="a" * 64, path="/a", rank=8)])
    await readiness(http, is_whole=True)
    batch_id = await start(http, named("a", "demo") + named("b", "demo") + named("c", "sql") + named("d", "demo"))
    await eventually(lambda: len(worker.waiting()) == 2)
    other_server.kill()
    await readiness(http, is_whole=False)
    await asyncio.sleep(FRESH_S)
    return batch_id


@pytest.mark.usefixtures("two_lines_at_once")
async def test_a_batch_waits_for_an_adapter_that_a_missing_server_may_have(
    spread: Serving, worker: FakeWorker, big: FakeWorker, other_server: OtherServer, monkeypatch: pytest.MonkeyPatch
):
    """One that was validated starts its other lines. One that was not is validated when all servers answer."""
    monkeypatch.setattr(advance, "VALIDATE_AGAIN_S", 0.1)
    async with spread() as http:
        first = await start_before_outage(http, worker, big, other_server)
        second = await start(http, named("e", "sql"))
        for num_completed in (2, 3):
            for job_id in worker.waiting():
                worker.end(job_id, COMPLETED)
            await until(http, first, lambda batch, num=num_completed: batch["request_counts"]["completed"] == num)
            await eventually(lambda num=num_completed: num == 3 or worker.waiting())
        assert (await http.get(f"/v1/batches/{second}")).json()["status"] == "validating"
        other_server.start()
        await eventually(lambda: len(big.waiting()) == 2)
        for job_id in big.waiting():
            assert big.start(job_id).adapter == "sql"
            big.end(job_id, COMPLETED)
        for batch_id in (first, second):
            await until(http, batch_id, lambda batch: batch["status"] == "completed")


async def test_a_batch_that_cannot_be_validated_ends_with_its_window(
    spread: Serving, redis: Redis, worker: FakeWorker, other_server: OtherServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(advance, "VALIDATE_AGAIN_S", 0.1)
    async with spread() as http:
        await readiness(http, is_whole=True)
        other_server.kill()
        await readiness(http, is_whole=False)
        await asyncio.sleep(FRESH_S)
        batch_id = await start(http, named("a", "sql"), completion_window="30m")
        await asyncio.sleep(0.5)
        assert (await http.get(f"/v1/batches/{batch_id}")).json()["status"] == "validating"
        let_expire(redis, batch_id)
        await until(http, batch_id, lambda batch: batch["status"] == "expired")


@pytest.mark.usefixtures("two_lines_at_once")
async def test_a_cancelled_batch_cancels_the_jobs_of_home_while_the_server_of_an_adapter_is_missing(
    spread: Serving, worker: FakeWorker, big: FakeWorker, other_server: OtherServer, monkeypatch: pytest.MonkeyPatch
):
    """The map does not name the adapter, so nothing but the missing server says where its jobs belong."""
    monkeypatch.setattr(collect, "CANCEL_TIMEOUT_S", 1.0)
    async with spread() as http:
        batch_id = await start_before_outage(http, worker, big, other_server)
        for job_id in worker.waiting():
            worker.end(job_id, COMPLETED)
        await until(http, batch_id, lambda batch: batch["request_counts"]["completed"] == 2)
        await eventually(worker.waiting)
        await http.post(f"/v1/batches/{batch_id}/cancel")
        await eventually(lambda: not worker.waiting())
        batch = await until(http, batch_id, lambda batch: batch["status"] == "cancelled")
    assert batch["request_counts"]["cancelled"] == 2


async def test_a_cancelled_batch_cancels_its_jobs_on_both_servers(spread: Serving, worker: FakeWorker, big: FakeWorker):
    async with spread() as http:
        batch_id = await start(http, jsonl(1) + jsonl(1, model="big").replace(b'"1"', b'"2"'))
        await eventually(lambda: worker.waiting() and big.waiting())
        await http.post(f"/v1/batches/{batch_id}/cancel")
        batch = await until(http, batch_id, lambda batch: batch["status"] == "cancelled")
    assert (worker.waiting(), big.waiting()) == (set(), set())
    assert batch["request_counts"]["cancelled"] == 2
