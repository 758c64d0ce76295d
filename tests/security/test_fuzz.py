"""Nonsense in any key that a worker reads ends in a Failure, and the worker goes on; the API goes on, too."""

import asyncio
import random
from typing import Any

import msgspec
import pytest
from redis import Redis

from scorepool import store, wire
from tests.api.conftest import Serving, score
from tests.api.fake_worker import FakeWorker
from tests.worker.conftest import Workers, generate, outcome, status, submit, until

NUM_MUTANTS = 60
SEED = 20_261_121
FIELDS = [
    *("data", "created_at", "enqueued_at", "timeout", "retries_left", "retry_intervals", "result_ttl", "failure_ttl"),
    *("meta", "origin", "description", "crashes", "cancel_requested", "dependency_ids", "group_id", "webhooks"),
    *("number_of_retries", "repeats_left", "repeat_intervals", "started_at", "ended_at", "worker_name", "status"),
]


def nonsense(rng: random.Random, depth: int = 0) -> Any:
    """Any value that msgpack carries."""
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
        return [nonsense(rng, depth + 1) for _ in range(rng.randrange(5))]
    names = ["type", "model", "items", "prompt", "completion", "messages", "max_tokens", "stop", "n", "seed", "z"]
    return {rng.choice(names): nonsense(rng, depth + 1) for _ in range(rng.randrange(6))}


def mutant(rng: random.Random, body: bytes) -> bytes:
    """A message with bytes changed, cut off, doubled, or replaced by something else altogether."""
    kind = rng.randrange(5)
    if kind == 0:
        return msgspec.msgpack.encode(nonsense(rng))
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


def test_fuzzed_requests_fail_one_by_one(redis: Redis, workers: Workers):
    rng = random.Random(SEED)
    body = wire.encode(generate(max_tokens=2))
    bad = [submit(redis, mutant(rng, body)) for _ in range(NUM_MUTANTS)]
    good = submit(redis, generate())

    assert workers.start("--burst").wait(timeout=60) == 0

    assert isinstance(outcome(redis, good), wire.Result)
    ends = [outcome(redis, job_id) for job_id in bad]
    assert None not in ends  # a mutant may still be a good request
    codes = {end.code for end in ends if isinstance(end, wire.Failure)}
    assert "invalid" in codes
    assert not codes & {"crashed", "canceled"}
    assert sum(isinstance(end, wire.Failure) for end in ends) > NUM_MUTANTS / 2


def test_fuzzed_fields_of_jobs_harm_only_their_job(redis: Redis, workers: Workers):
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
    for strange in ("", ":", "a:b", "\xff", "../x", "x" * 5000):
        redis.rpush("rq:queue:demo", strange.encode("latin-1"))
        redis.zadd("rq:wip:demo", {strange.encode("latin-1"): 1.0})
    good = submit(redis, generate())

    assert workers.start("--burst").wait(timeout=60) == 0

    assert isinstance(outcome(redis, good), wire.Result)
    assert redis.llen("rq:queue:demo") == 0
    for job_id in bad:
        assert outcome(redis, job_id) is not None, redis.hgetall(f"rq:job:{job_id}")
        assert status(redis, job_id) != "started"


def test_keys_of_another_type_of_redis_harm_only_their_job(redis: Redis, workers: Workers):
    """A script of ours that stumbled over one would stop every worker of the queue."""
    strings = [submit(redis, generate()) for _ in range(3)]
    request = submit(redis, generate())
    owned = submit(redis, generate(), webhook=True)
    good = submit(redis, generate())
    for id_ in strings:
        redis.delete(f"rq:job:{id_}")
        redis.set(f"rq:job:{id_}", "a string")
    redis.zadd("rq:wip:demo", {f"{strings[0]}:gone": 1.0})
    redis.lrem("rq:queue:demo", 1, strings[1])
    redis.rpush("scorepool:backlog:demo:alice", strings[1])
    redis.zadd("scorepool:turns:demo", {"alice": 0})
    redis.delete(store.Keys.request(request))
    redis.hset(store.Keys.request(request), "a", "hash")
    redis.set(store.Keys.endpoints("alice"), "a string")

    assert workers.start("--burst").wait(timeout=60) == 0

    assert [isinstance(outcome(redis, id_), wire.Result) for id_ in (owned, good)] == [True, True]
    assert redis.lrange("rq:queue:webhooks", 0, -1) == [f"wh_{owned}".encode()]
    end = outcome(redis, request)
    assert isinstance(end, wire.Failure)
    assert "no longer in Redis" in end.message
    assert redis.zcard("rq:wip:demo") == redis.llen("rq:queue:demo") == 0


def test_a_job_that_becomes_another_type_of_redis_while_it_runs_is_dropped(redis: Redis, workers: Workers):
    bad, good = submit(redis, generate(max_tokens=100_000)), submit(redis, generate(max_tokens=300))
    worker = workers.start("--burst")
    until(lambda: status(redis, bad) == "started")
    redis.delete(f"rq:job:{bad}")
    redis.set(f"rq:job:{bad}", "a string")

    assert worker.wait(timeout=60) == 0

    assert isinstance(outcome(redis, good), wire.Result)
    assert outcome(redis, bad) is None


def test_a_count_of_crashes_that_is_none_keeps_no_worker_from_taking_jobs_back(redis: Redis, workers: Workers):
    bad = submit(redis, generate(), fields={"company": "1", "crashes": "nonsense"})
    redis.lrem("rq:queue:demo", 1, bad)
    redis.zadd("rq:wip:demo", {f"{bad}:gone": 1.0})

    workers.start()

    until(lambda: outcome(redis, bad))


@pytest.mark.anyio
async def test_fuzzed_entries_of_the_streams_do_not_deafen_the_api(serving: Serving, redis: Redis, worker: FakeWorker):
    rng = random.Random(SEED)
    async with serving() as http:
        job_id = (await http.post("/v1/jobs", json=score())).json()["id"]
        followed = asyncio.create_task(http.get(f"/v1/jobs/{job_id}/events"))
        while (await http.get("/readyz")).status_code != 200:
            pass
        for _ in range(NUM_MUTANTS):
            nothing = msgspec.msgpack.encode(nonsense(rng))
            for stream, field in ((store.TOKENS, "step"), (store.DONE, "id"), (store.DONE, "x"), (store.TOKENS, "x")):
                redis.xadd(stream, {field: nothing})
        worker.end(job_id)
        events = (await followed).text
        late = await http.get(f"/v1/jobs/{(await http.post('/v1/jobs', json=score())).json()['id']}?wait=0.1")

        assert "event: end" in events
        assert late.json()["status"] == "queued"
        assert (await http.get("/readyz")).status_code == 200
