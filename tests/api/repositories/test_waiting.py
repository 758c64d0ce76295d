"""The end of a job wakes the clients that wait for it, without a missed wake-up and without polling."""

import asyncio
import math
import random
import time

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import ConnectionError as RedisConnectionError

from scorepool import store, wire
from scorepool.api.repositories.event_reader import EventReader
from scorepool.api.repositories.jobs import Jobs
from scorepool.api.repositories.waiting import Waiting
from tests.api.conftest import Serving, eventually, score
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio
AGES_S = 60  # far longer than any of these tests takes


def calls(redis: Redis, command: str) -> int:
    return redis.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0)


async def test_a_hundred_waiters_wake_without_polling(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        ids = [job["id"] for job in (await http.post("/v1/jobs/bulk", json=[score()] * 100)).json()]
        for _ in range(1000):  # a reader that connects wakes every waiter once
            if (await http.get("/readyz")).status_code == 200:
                break
            await asyncio.sleep(0.01)
        redis.config_resetstat()
        waiting = [asyncio.create_task(http.get(f"/v1/jobs/{id_}?wait={AGES_S}")) for id_ in ids]
        await eventually(lambda: calls(redis, "hmget") >= 100)
        await asyncio.sleep(0.3)
        reads_before = calls(redis, "hmget")
        started_at = time.monotonic()
        for id_ in random.sample(ids, 100):
            await asyncio.to_thread(worker.end, id_)
        jobs = [(await reply).json() for reply in waiting]
    assert [job["id"] for job in jobs] == ids
    assert {job["status"] for job in jobs} == {"finished"}
    assert 100 <= reads_before < 190  # the snapshot of the queues may read the worker's record meanwhile
    assert time.monotonic() - started_at < AGES_S / 2


async def test_no_wake_up_is_lost_when_jobs_end_as_their_waiters_arrive(
    serving: Serving, worker: FakeWorker, redis: Redis
):
    async with serving() as http:
        for _ in range(4):
            ids = [job["id"] for job in (await http.post("/v1/jobs/bulk", json=[score()] * 25)).json()]
            ender = asyncio.create_task(asyncio.to_thread(lambda ids=ids: [worker.end(id_) for id_ in ids]))
            replies = await asyncio.gather(*(http.get(f"/v1/jobs/{id_}?wait={AGES_S}") for id_ in ids))
            await ender
            assert {reply.json()["status"] for reply in replies} == {"finished"}


async def test_an_end_between_the_read_and_the_wait_still_wakes(redis: Redis, redis_url: str):
    """The job ends after its state was read as queued and before the wait begins."""
    stream = AsyncRedis.from_url(redis_url)
    waiting = Waiting([EventReader(stream, stream)], on_ended=lambda _: None)
    waiting.start()
    await eventually(lambda: waiting.is_alive)
    reads = 0

    async def read() -> tuple[wire.Job, float]:
        nonlocal reads
        reads += 1
        status: wire.Status = "queued" if reads == 1 else "finished"
        if reads == 1:
            redis.xadd(store.DONE, {"id": "j"})
            await asyncio.sleep(0.2)  # the entry arrives during the read
        return wire.Job(id="j", kind="score", model="m", status=status, created_at=0.0), math.inf

    job = await waiting.until_ended("j", read, AGES_S)
    assert (job.status, reads, len(waiting)) == ("finished", 2, 0)
    await waiting.close()
    await stream.aclose()


async def test_a_wait_that_times_out_answers_with_the_jobs_present_state(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        id_ = (await http.post("/v1/jobs", json=score())).json()["id"]
        reply = await http.get(f"/v1/jobs/{id_}?wait=0.05")
    assert (reply.status_code, reply.json()["status"]) == (200, "queued")


async def test_waiters_survive_a_lost_connection(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        id_ = (await http.post("/v1/jobs", json=score())).json()["id"]
        waiting = asyncio.create_task(http.get(f"/v1/jobs/{id_}?wait={AGES_S}"))
        await asyncio.sleep(0.1)
        redis.client_kill_filter(_type="normal", skipme=True)
        worker.end(id_)
        assert (await waiting).json()["status"] == "finished"


async def test_waiters_wake_when_the_stream_has_lost_its_last_entries(redis: Redis, redis_url: str):
    """This happens after a failover to a replica that did not have them."""
    redis.xadd(store.DONE, {"id": "lost"}, id="99999999999999-0")
    stream = AsyncRedis.from_url(redis_url, socket_timeout=AGES_S)
    waiting = Waiting([EventReader(stream, stream)], on_ended=lambda _: None)
    waiting.start()
    await eventually(lambda: waiting.is_alive)
    redis.delete(store.DONE)
    redis.client_kill_filter(_type="normal", skipme=True)
    reads: list[str] = []

    async def read() -> tuple[wire.Job, float]:
        status: wire.Status = "finished" if redis.exists(store.DONE) else "queued"
        reads.append(status)
        return wire.Job(id="j", kind="score", model="m", status=status, created_at=0.0), math.inf

    job = asyncio.create_task(waiting.until_ended("j", read, AGES_S))
    await eventually(lambda: len(reads) >= 2)  # read again after the connection was lost
    redis.xadd(store.DONE, {"id": "j"})
    async with asyncio.timeout(AGES_S / 2):
        assert (await job).status == "finished"
    await waiting.close()
    await stream.aclose()


async def test_a_job_that_is_deleted_during_a_wait_is_404(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        id_ = (await http.post("/v1/jobs", json=score())).json()["id"]
        waiting = asyncio.create_task(http.get(f"/v1/jobs/{id_}?wait={AGES_S}"))
        await asyncio.sleep(0.1)
        redis.delete(f"rq:job:{id_}")
        redis.xadd(store.DONE, {"id": id_})
        assert (await waiting).status_code == 404


async def test_an_accepted_job_is_answered_with_its_id_if_redis_fails_during_the_wait(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    async def away(*_: object) -> None:
        raise RedisConnectionError

    async with serving() as http:
        with monkeypatch.context() as patch:
            patch.setattr(Jobs, "read_with_expiry", away)
            reply = await http.post("/v1/jobs", json=score(), headers={"Prefer": "wait=5"})
            unknown = await http.get("/v1/jobs/" + "0" * 32)
        assert (reply.status_code, reply.json()["status"]) == (202, "queued")
        assert (await http.get(reply.headers["Location"])).json()["id"] == reply.json()["id"]
    assert unknown.status_code == 503
    assert "it is not known whether this request took effect" in unknown.json()["error"]["message"]
