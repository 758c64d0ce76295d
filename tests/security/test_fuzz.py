"""Nonsense in any key that a worker reads ends in a Failure, and the worker goes on; the API goes on, too."""

import asyncio
import random
from typing import Any

import msgspec
import pytest
from redis import Redis

import wire
from tests.api.conftest import Serving, score
from tests.api.fake_worker import FakeWorker
from tests.worker.conftest import Workers, generate, outcome, status, submit

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
            for stream, field in ((wire.TOKENS, "step"), (wire.DONE, "id"), (wire.DONE, "x"), (wire.TOKENS, "x")):
                redis.xadd(stream, {field: nothing})
        worker.end(job_id)
        events = (await followed).text
        late = await http.get(f"/v1/jobs/{(await http.post('/v1/jobs', json=score())).json()['id']}?wait=0.1")

        assert "event: end" in events
        assert late.json()["status"] == "queued"
        assert (await http.get("/readyz")).status_code == 200


@pytest.mark.anyio
async def test_a_record_that_cannot_be_read_hides_no_other(serving: Serving, redis: Redis, worker: FakeWorker):
    async with serving() as http:
        good, *bad = [job["id"] for job in (await http.post("/v1/jobs/bulk", json=[score()] * 5)).json()]
        for job_id, field in zip(bad, ("status", "kind", "created", "ended_at"), strict=True):
            redis.hset(f"rq:job:{job_id}", mapping={"status": "finished", field: b"\xffnonsense"})

        assert [job["id"] for job in (await http.get("/v1/jobs")).json()["jobs"]] == [good]
