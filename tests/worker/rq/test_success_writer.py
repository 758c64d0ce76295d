"""The script that ends jobs that succeeded, compared with RQ's own methods."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis
from rq.timeouts import UnixSignalDeathPenalty

from scorepool import store, wire
from scorepool.worker import Queue
from scorepool.worker.rq import success_writer as success
from scorepool.worker.rq.commit import ResultCommitter
from scorepool.worker.rq.in_flight import InFlightJob
from scorepool.worker.rq.leases import Claim, Leases
from tests.worker.conftest import done, generate, outcome, status, submit

ENDPOINT = b'{"endpoint": {"id": "e1", "events": ["job.finished"]}}'
RESULT = wire.Result(
    sequences=[],
    temperature=1.0,
    usage=wire.Usage(prompt_tokens=1, completion_tokens=1),
    stamp=wire.Provenance(
        model="demo",
        fingerprint="f",
        dtype="float32",
        quantization=None,
        adapter=None,
        mode="default",
        backend="",
        versions={},
    ),
)


@pytest.fixture
def leases(redis: Redis) -> Leases:
    return Leases(redis, "mac", "rq:worker:mac", 60.0)


@pytest.fixture
def record(redis: Redis, leases: Leases) -> ResultCommitter:
    return ResultCommitter(redis, leases, 500, UnixSignalDeathPenalty, lambda *error: None, logging.getLogger())


def claim_and_succeed(redis: Redis, leases: Leases, value: object = RESULT) -> list[InFlightJob]:
    """Claim all waiting jobs, as a worker does, and let them succeed."""
    rows = leases.claim([Queue("demo", connection=redis)], Claim(max_jobs=32, num_in_flight=0, max_in_flight=32)).jobs
    jobs = []
    for row in rows:
        inflight = InFlightJob.from_claimed(row, redis, "mac", {})
        inflight.job.extra_fields = {"tries": "1"}
        inflight.succeed(value)
        jobs.append(inflight)
    return jobs


def contents(redis: Redis, job_id: str) -> dict[str, Any]:
    """Return every key with its value and rough time to live. Empty and varying fields are left out."""
    read: dict[bytes, Callable[[bytes], Any]] = {
        b"string": redis.get,
        b"list": lambda key: redis.lrange(key, 0, -1),
        b"set": redis.smembers,
        b"zset": lambda key: redis.zrange(key, 0, -1),
        b"hash": lambda key: {name: value for name, value in redis.hgetall(key).items() if value not in (b"", b"0")},
        b"stream": lambda key: [fields for _, fields in redis.xrange(key)],
    }
    # Fields that differ between runs: times, ids, and a job's data, which RQ compresses when it writes the job again.
    passing = (b"at", b"last_heartbeat", b"last_claim", b"since", b"execution_id", b"total_working_time", b"data")

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items() if not name.endswith(passing)}
        if isinstance(value, list | set):
            return sorted(map(plain, value), key=str)
        return value.replace(job_id.encode(), b"ID")

    return {
        key.decode().replace(job_id, "ID"): (plain(read[redis.type(key)](key)), redis.ttl(key) // 10)
        for key in redis.scan_iter()
    }


@pytest.mark.parametrize("is_of_the_api", [True, False])
def test_the_script_leaves_the_same_keys_as_rqs_own_methods(
    redis: Redis, leases: Leases, record: ResultCommitter, monkeypatch: pytest.MonkeyPatch, is_of_the_api: bool
):
    left = []
    for takes in (lambda self, inflight: False, success.SuccessWriter.is_plain_success):
        redis.flushdb()
        redis.hset(store.Keys.endpoints_of("alice"), "e1", ENDPOINT)
        monkeypatch.setattr(success.SuccessWriter, "is_plain_success", takes)
        if is_of_the_api:
            job_id = submit(redis, generate(), webhook=True, fields={store.JobField.MAX_CONCURRENCY: 4, "crashes": 1})
        else:
            job_id = Queue("demo", connection=redis).enqueue("add", 1, 2, result_ttl=60, job_id="a" * 32).id
        [inflight] = claim_and_succeed(redis, leases, RESULT if is_of_the_api else 3)
        assert record.commit([inflight], None) == [inflight]
        left.append(contents(redis, job_id))

    assert left[0] == left[1]
    assert left[0]["rq:job:ID"][0][b"status"] == b"finished"
    assert ("scorepool:outcome:ID" in left[0]) == is_of_the_api


def test_no_success_is_recorded_for_a_lost_lease(redis: Redis, leases: Leases, record: ResultCommitter):
    kept, lost = [submit(redis, generate()) for _ in range(2)]
    jobs = claim_and_succeed(redis, leases)
    leases.release(jobs[1:])

    assert record.commit(jobs, None) == jobs[:1]

    assert done(redis) == [kept]
    assert (status(redis, lost), outcome(redis, lost)) == ("queued", None)
    assert redis.hget("rq:worker:mac", "successful_job_count") == b"1"


def test_many_large_outcomes_are_written_in_several_calls(
    redis: Redis, leases: Leases, record: ResultCommitter, monkeypatch: pytest.MonkeyPatch
):
    ids = [submit(redis, generate()) for _ in range(5)]
    monkeypatch.setattr(success, "MAX_BYTES", 2 * len(wire.encode(RESULT)))

    jobs = claim_and_succeed(redis, leases)
    recorded = record.commit(jobs, None)

    assert recorded == jobs
    assert done(redis) == ids
    assert redis.hget("rq:worker:mac", "successful_job_count") == b"5"
    calls = redis.info("commandstats")["cmdstat_evalsha"]["calls"]
    record.commit(jobs, None)  # the leases of these jobs are gone by now
    assert redis.info("commandstats")["cmdstat_evalsha"]["calls"] - calls == 3
