"""Names of models that nobody serves are bounded in number, leave nothing in Redis, and slow nobody down."""

import asyncio
import logging
from collections import Counter
from typing import Any

import httpx
import pytest
from redis import Redis
from rq.queue import Queue

import scorepool.api.metrics.queue_snapshot as queue_snapshot
from scorepool import store
from scorepool.store.scripts import load
from scorepool.worker.claims.leases import Claim, Leases
from scorepool.worker.rq.scheduler import Scheduler
from scorepool.worker.rq.sweep import Sweep
from tests.api.conftest import ALICE, BOB, KEYS, Serving, bearer, score
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio
COUNTS = [1500, pytest.param(100_000, marks=pytest.mark.soak)]


async def submit(http: httpx.AsyncClient, key: str, model: str, **changes: Any) -> httpx.Response:
    return await http.post("/v1/jobs", json=score(model=model, wait_for_model=True, **changes), headers=bearer(key))


def make_names(redis: Redis, num: int) -> None:
    """Leave what a deployment without a bound leaves: queues with a job each."""
    with redis.pipeline(transaction=False) as pipeline:
        for index in range(num):
            pipeline.sadd(store.RqKeys.queues, store.RqKeys.queue(f"name{index}"))
            pipeline.rpush(store.RqKeys.queue(f"name{index}"), f"{index:032x}")
            if len(pipeline) >= 5000:
                pipeline.execute()
        pipeline.execute()


def calls(redis: Redis) -> Counter[str]:
    """Return how often each command was called so far, in scripts too."""
    stats: Any = redis.info("commandstats")
    return Counter(
        {name: stat["calls"] for name, stat in stats.items() if name not in ("cmdstat_info", "cmdstat_xread")}
    )


async def test_a_key_that_makes_up_models_is_refused_and_others_are_not(serving: Serving, worker: FakeWorker):
    async with serving(api_keys=KEYS, max_unserved_queues_per_key=20) as http:
        replies = [await submit(http, ALICE, f"name{index}") for index in range(40)]
        bobs = [await submit(http, BOB, "llama"), await submit(http, BOB, "demo")]
        served = await submit(http, ALICE, "demo")
        again = await submit(http, ALICE, "name3")
        ids = [reply.json()["id"] for reply in replies[:20]]
        await http.post(f"/v1/jobs/{ids[0]}/cancel", headers=bearer(ALICE))
        canceled = await submit(http, ALICE, "new")
        await http.delete(f"/v1/jobs/{ids[0]}", headers=bearer(ALICE))
        deleted = await submit(http, ALICE, "new")

    assert [reply.status_code for reply in replies] == [202] * 20 + [429] * 20
    error = replies[-1].json()["error"]
    assert (error["code"], replies[-1].headers["retry-after"]) == ("queue_full", "60")
    assert "SCOREPOOL_MAX_UNSERVED_QUEUES_PER_KEY" in error["message"]
    assert [reply.status_code for reply in (*bobs, served, again)] == [202] * 4
    assert (canceled.status_code, deleted.status_code) == (429, 202)


async def test_all_keys_together_are_bounded_and_each_may_have_ten(serving: Serving, worker: FakeWorker):
    async with serving(api_keys=KEYS, max_unserved_queues=25) as http:
        alices = [await submit(http, ALICE, f"name{index}") for index in range(30)]
        bobs = [await submit(http, BOB, f"model{index}") for index in range(15)]
    assert [reply.status_code for reply in alices] == [202] * 25 + [429] * 5
    assert "SCOREPOOL_MAX_UNSERVED_QUEUES)" in alices[-1].json()["error"]["message"]
    assert [reply.status_code for reply in bobs] == [202] * 10 + [429] * 5


async def test_a_queue_that_a_worker_serves_by_now_is_not_counted(serving: Serving, redis: Redis, worker: FakeWorker):
    async with serving(api_keys=KEYS, max_unserved_queues_per_key=1) as http:
        await submit(http, ALICE, "late")
        assert (await submit(http, ALICE, "other")).status_code == 429
        redis.sadd(store.RqKeys.workers_of("late"), "rq:worker:w2")
        assert (await submit(http, ALICE, "other")).status_code == 202


@pytest.mark.parametrize("ending", ["deleted", "expired"])
async def test_a_queue_without_jobs_leaves_nothing(serving: Serving, redis: Redis, worker: FakeWorker, ending: str):
    async with serving(api_keys=KEYS) as http:
        await submit(http, ALICE, "demo")
        before = set(redis.scan_iter())
        replies = [
            await submit(http, ALICE, f"name{index}", priority=priority)
            for index in range(3)
            for priority in ("low", "normal", "high")
        ]
        ids = [reply.json()["id"] for reply in replies]
        assert len(set(redis.scan_iter()) - before) > len(ids)
        for job_id in ids:
            assert (await http.post(f"/v1/jobs/{job_id}/cancel", headers=bearer(ALICE))).status_code == 200
            if ending == "deleted":
                assert (await http.delete(f"/v1/jobs/{job_id}", headers=bearer(ALICE))).status_code == 204
    if ending == "expired":
        redis.delete(*map(store.RqKeys.job, ids), *map(store.Keys.outcome, ids))
        redis.zadd(store.Keys.unserved, dict.fromkeys(redis.zrange(store.Keys.unserved, 0, -1), 0))
        redis.zadd(store.Keys.sweep_schedule, {store.Keys.jobs_of("alice"): 0})
        Sweep(redis, [], 60).run()
    permanent = {store.DONE.encode(), store.Keys.outcome_counts.encode()}
    history = set(redis.scan_iter(f"{store.Keys.history}*"))  # written when a slot of time begins, which may be now
    assert set(redis.scan_iter()) - permanent - history == before - history
    assert redis.smembers(store.RqKeys.queues) == {b"rq:queue:demo"}


@pytest.mark.parametrize("num", COUNTS)
async def test_queues_of_an_old_deployment_are_removed_when_they_are_empty(redis: Redis, num: int):
    make_names(redis, num)
    redis.set("rq:suspended", "1")
    kept = {f"rq:queue:name{index}".encode() for index in range(10)}
    redis.delete(*(key for key in redis.scan_iter("rq:queue:*", count=10_000) if key not in kept))
    sweep = Sweep(redis, ["demo"], 60)
    for _ in range(num):
        if redis.scard(store.RqKeys.queues) < 40:  # as few as one call of the script checks
            break
        sweep.run()
    sweep.run()
    assert redis.smembers(store.RqKeys.queues) == kept


@pytest.mark.parametrize("num", COUNTS)
async def test_bob_is_served_while_metrics_are_read_beside_many_names(
    serving: Serving, redis: Redis, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, num: int
):
    monkeypatch.setattr(queue_snapshot, "FRESH_S", 60.0)
    make_names(redis, num)
    async with serving() as http:
        await http.get("/metrics")  # loads the script
    async with serving(api_keys=KEYS) as http:
        while (await http.get("/readyz")).status_code != 200:  # noqa: ASYNC110 - another process ends it
            await asyncio.sleep(0.01)
        before = calls(redis)
        attack = [http.get(path) for path in ("/metrics", "/readyz", "/healthz") for _ in range(50)]
        attack += [http.get("/v1/models", headers=bearer(ALICE)) for _ in range(50)]
        bobs = [submit(http, BOB, "demo") for _ in range(20)]
        replies = await asyncio.gather(*attack, *bobs)
        spent = calls(redis) - before
    assert {reply.status_code for reply in replies[:200]} == {200}
    assert [reply.status_code for reply in replies[200:]] == [202] * 20
    assert spent["cmdstat_sscan"] <= queue_snapshot.MAX_UNSERVED / queue_snapshot.COUNT_AT_ONCE + 1
    assert spent["cmdstat_zcard"] <= 6 * (queue_snapshot.MAX_UNSERVED + queue_snapshot.COUNT_AT_ONCE)
    assert spent["cmdstat_smembers"] <= 10
    metrics = replies[0].text
    assert "name1" not in metrics
    [shown] = [line for line in metrics.splitlines() if 'queue="(unserved)",state="queued"' in line]
    assert float(shown.split()[-1]) >= min(num, queue_snapshot.MAX_UNSERVED)


@pytest.mark.parametrize("num", COUNTS)
async def test_a_worker_s_loop_does_not_walk_names_that_it_does_not_serve(redis: Redis, num: int):
    """Claims, reclaims and the scheduler cost the same with and without them; a sweep looks at a bounded number."""
    queues = [Queue(name, connection=redis) for name in store.queue_names("demo")]
    names = [queue.name for queue in queues]
    leases, sweep = Leases(redis, "w1", store.RqKeys.worker("w1"), 20.0), Sweep(redis, names, 60)
    scheduler = Scheduler(queues, redis, 1, logging.ERROR)

    def spend() -> Counter[str]:
        before = calls(redis)
        leases.claim(queues, Claim(max_jobs=8, num_in_flight=0, max_in_flight=8))
        leases.reclaim(queues, 5)
        scheduler.enqueue_scheduled_jobs()
        return calls(redis) - before

    spend()  # loads the scripts
    alone = spend()
    make_names(redis, num)
    assert spend() == alone
    before = calls(redis)
    assert not redis.register_script(load("sweep.lua"))(args=[60, *names])
    assert sum((calls(redis) - before).values()) < 1000
    sweep.run()
    assert redis.scard(store.RqKeys.queues) == num
