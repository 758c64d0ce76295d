"""Random data in any key that a worker reads fails only that job; worker and API go on."""

import asyncio
import random
from typing import Any

import msgspec
import pytest
from redis import Redis

from scorepool import store, wire
from scorepool.worker import Queue
from scorepool.worker.claims.leases import Leases
from tests.api.conftest import Serving, score
from tests.api.fake_worker import FakeWorker
from tests.worker.conftest import Workers, generate, outcome, status, submit, until

NUM_MUTANTS = 60
SEED = 20_261_121
DELIVERY_FIELDS = {"event", "at", "job", "endpoint", "url", "since", "tries", "attempts", "reason"}
RQ_FIELDS = {"meta", "dependency_ids", "group_id", "webhooks", "repeats_left", "repeat_intervals"}  # that only RQ reads
FIELDS = sorted(set(store.JobField.all().values()) - DELIVERY_FIELDS | RQ_FIELDS)


def random_value(rng: random.Random, depth: int = 0) -> Any:
    """Draw any value that msgpack can encode."""
    kind = rng.randrange(9 if depth < 4 else 7)
    if kind == 0:
        return rng.choice([None, True, False, 0, -1, 2**31, 2**63, -(2**63), 2**64 - 1])
    if kind == 1:
        return rng.choice([0.0, -0.0, float("nan"), float("inf"), -1e308])
    if kind in (2, 3):
        return rng.choice(["", "demo", "score", "type", "x" * 5000, "\x00", "\ud7ff", "../../etc/passwd", "os.system"])
    if kind in (4, 5):
        return rng.randbytes(rng.randrange(40))
    if kind == 6:
        return [rng.randrange(-5, 2**40) for _ in range(rng.randrange(6))]
    if kind == 7:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    names = ["type", "model", "items", "prompt", "completion", "messages", "max_tokens", "stop", "n", "seed", "z"]
    return {rng.choice(names): random_value(rng, depth + 1) for _ in range(rng.randrange(6))}


def mutate(rng: random.Random, body: bytes) -> bytes:
    """Change bytes of a message, truncate it, append to it, or replace it."""
    kind = rng.randrange(5)
    if kind == 0:
        return msgspec.msgpack.encode(random_value(rng))
    if kind == 1:
        return body[: rng.randrange(len(body))]
    if kind == 2:
        return body + rng.randbytes(rng.randrange(1, 20))
    if kind == 3:
        return b"\x91" * rng.randrange(1, 100_000)
    changed = bytearray(body)
    for _ in range(rng.randrange(1, 6)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def test_fuzzed_requests_fail_only_themselves(redis: Redis, workers: Workers):
    rng = random.Random(SEED)
    body = wire.encode(generate(max_tokens=2))
    bad = [submit(redis, mutate(rng, body)) for _ in range(NUM_MUTANTS)]
    good = submit(redis, generate())

    assert workers.start("--burst").wait(timeout=60) == 0

    assert isinstance(outcome(redis, good), wire.Result)
    outcomes = [outcome(redis, job_id) for job_id in bad]
    assert None not in outcomes
    codes = {end.code for end in outcomes if isinstance(end, wire.Failure)}
    assert "invalid" in codes
    assert not codes & {"crashed", "canceled"}
    assert sum(isinstance(end, wire.Failure) for end in outcomes) > NUM_MUTANTS / 2  # some mutants are valid requests


def test_fuzzed_job_fields_fail_only_their_job(redis: Redis, workers: Workers):
    rng = random.Random(SEED)
    values = [
        b"",
        b"\x80\x04K\x01.",
        b"NaN",
        b"-1",
        b"9" * 400,
        b"[",
        b"7",
        b"[[]]",
        b"\xff\xfe",
        b"os.system",
        b"x" * 100_000,
    ]
    bad = [submit(redis, generate(), fields={field: rng.choice(values)}) for field in FIELDS for _ in range(3)]
    for member in ("", ":", "a:b", "\xff", "../x", "x" * 5000):
        redis.rpush("rq:queue:demo", member.encode("latin-1"))
        redis.zadd("rq:wip:demo", {member.encode("latin-1"): 1.0})
    good = submit(redis, generate())

    assert workers.start("--burst").wait(timeout=60) == 0

    assert isinstance(outcome(redis, good), wire.Result)
    assert redis.llen("rq:queue:demo") == 0
    for job_id in bad:
        assert outcome(redis, job_id) is not None, redis.hgetall(f"rq:job:{job_id}")
        assert status(redis, job_id) != "started"


def test_keys_of_a_wrong_redis_type_fail_only_their_job(redis: Redis, workers: Workers):
    """A Lua script that fails on such a key would stop every worker of the queue."""
    strings = [submit(redis, generate()) for _ in range(3)]
    request = submit(redis, generate())
    owned = submit(redis, generate(), webhook=True)
    good = submit(redis, generate())
    for job_id in strings:
        redis.delete(f"rq:job:{job_id}")
        redis.set(f"rq:job:{job_id}", "a string")
    redis.zadd("rq:wip:demo", {f"{strings[0]}:gone": 1.0})
    redis.lrem("rq:queue:demo", 1, strings[1])
    redis.rpush("scorepool:backlog:demo:alice", strings[1])
    redis.zadd("scorepool:turns:demo", {"alice": 0})
    redis.delete(store.Keys.request(request))
    redis.hset(store.Keys.request(request), "a", "hash")
    redis.set(store.Keys.endpoints_of("alice"), "a string")

    assert workers.start("--burst").wait(timeout=60) == 0

    assert [isinstance(outcome(redis, job_id), wire.Result) for job_id in (owned, good)] == [True, True]
    assert redis.lrange("rq:queue:webhooks", 0, -1) == [f"wh_{owned}".encode()]
    end = outcome(redis, request)
    assert isinstance(end, wire.Failure)
    assert "no longer in Redis" in end.message
    assert redis.zcard("rq:wip:demo") == redis.llen("rq:queue:demo") == 0


def test_a_running_job_whose_hash_gets_a_wrong_redis_type_is_dropped(redis: Redis, workers: Workers):
    bad, good = submit(redis, generate(max_tokens=100_000)), submit(redis, generate(max_tokens=300))
    worker = workers.start("--burst")
    until(lambda: status(redis, bad) == "started")
    redis.delete(f"rq:job:{bad}")
    redis.set(f"rq:job:{bad}", "a string")

    assert worker.wait(timeout=60) == 0

    assert isinstance(outcome(redis, good), wire.Result)
    assert outcome(redis, bad) is None


def test_an_invalid_crash_count_does_not_stop_the_recovery_of_jobs(redis: Redis, workers: Workers):
    bad = submit(redis, generate(), fields={store.JobField.MAX_CONCURRENCY: "1", store.JobField.CRASHES: "nonsense"})
    redis.lrem("rq:queue:demo", 1, bad)
    redis.zadd("rq:wip:demo", {f"{bad}:gone": 1.0})

    num_back, to_end = Leases(redis, "mac", "rq:worker:mac", 60.0).reclaim(
        [Queue("demo", connection=redis)], crash_limit=5, held_by_dead=[f"{bad}:gone"]
    )
    assert (num_back, to_end) == (1, [])
    workers.start()

    until(lambda: outcome(redis, bad))
    assert isinstance(outcome(redis, bad), wire.Result)


def test_a_job_with_an_invalid_crash_count_whose_worker_is_silent_ends(redis: Redis, workers: Workers):
    bad = submit(redis, generate(), fields={store.JobField.CRASHES: "nonsense"})
    redis.lrem("rq:queue:demo", 1, bad)
    redis.zadd("rq:wip:demo", {f"{bad}:gone": 1.0})

    workers.start()

    until(lambda: outcome(redis, bad))
    assert outcome(redis, bad).code == "invalid"


@pytest.mark.anyio
async def test_fuzzed_stream_entries_do_not_stop_the_api_from_reading(
    serving: Serving, redis: Redis, worker: FakeWorker
):
    rng = random.Random(SEED)
    async with serving() as http:
        job_id = (await http.post("/v1/jobs", json=score())).json()["id"]
        events_request = asyncio.create_task(http.get(f"/v1/jobs/{job_id}/events"))
        while (await http.get("/readyz")).status_code != 200:
            pass
        for _ in range(NUM_MUTANTS):
            value = msgspec.msgpack.encode(random_value(rng))
            for stream, field in ((store.TOKENS, "step"), (store.DONE, "id"), (store.DONE, "x"), (store.TOKENS, "x")):
                redis.xadd(stream, {field: value})
        worker.end(job_id)
        events = (await events_request).text
        late = await http.get(f"/v1/jobs/{(await http.post('/v1/jobs', json=score())).json()['id']}?wait=0.1")

        assert "event: end" in events
        assert late.json()["status"] == "queued"
        assert (await http.get("/readyz")).status_code == 200
