"""Ends of jobs that succeeded: the script leaves what RQ's own methods leave, in messages of any size, once."""

import logging
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from rq.timeouts import UnixSignalDeathPenalty
from rq.worker import WorkerStatus

from scorepool import store, wire
from scorepool.worker import Queue
from scorepool.worker import Redis as Client
from scorepool.worker.claims.leases import Claim, Leases
from scorepool.worker.redis_link.link_speed import MIN_MESSAGE_BYTES
from scorepool.worker.redis_link.script_calls import load_scripts, run_scripts
from scorepool.worker.rq.commit import ResultCommitter
from scorepool.worker.rq.in_flight import InFlightJob
from scorepool.worker.rq.success_writer import Message, SuccessWriter
from tests.fleet.link import Link
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
    for takes in (lambda self, inflight: False, SuccessWriter.is_plain_success):
        redis.flushdb()
        redis.hset(store.Keys.endpoints_of("alice"), "e1", ENDPOINT)
        monkeypatch.setattr(SuccessWriter, "is_plain_success", takes)
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


@pytest.fixture
def writer(redis: Redis, leases: Leases) -> SuccessWriter:
    return SuccessWriter(redis, leases, 500, give_up_s=20.0)


def over(redis: Redis, leases: Leases, *sizes: int) -> list[InFlightJob]:
    """Submit a job for each size of an outcome, in bytes; return them as they are when they have ended."""
    for _ in sizes:
        submit(redis, generate())
    jobs = claim_and_succeed(redis, leases)
    for number, (inflight, size) in enumerate(zip(jobs, sizes, strict=True)):
        inflight.job.outcome = random.Random(number).randbytes(size)
        inflight.job.ended_at = inflight.job.redis_now()
    return jobs


def next_message(writer: SuccessWriter, jobs: list[InFlightJob], budget_bytes: int) -> Message:
    return writer.next_message(jobs, budget_bytes, None, WorkerStatus.IDLE)


def exchange(redis: Redis, writer: SuccessWriter, jobs: list[InFlightJob], budget_bytes: int) -> Message:
    """Run the message that is due. Remove the jobs that are over from `jobs`."""
    message = next_message(writer, jobs, budget_bytes)
    for inflight in writer.apply(message, run_scripts(redis, message.calls)).all:
        jobs.remove(inflight)
    return message


def stored(redis: Redis, inflight: InFlightJob) -> bytes | None:
    return redis.get(store.Keys.outcome(inflight.job.id))


def uploads(redis: Redis) -> list[bytes]:
    return redis.keys(store.Keys.outcome_upload("*"))


def test_many_outcomes_are_written_in_several_messages(redis: Redis, leases: Leases, writer: SuccessWriter):
    jobs = over(redis, leases, *[20_000] * 8)
    calls = redis.info("commandstats")["cmdstat_evalsha"]["calls"]

    assert writer.write(jobs, None, WorkerStatus.IDLE) == (jobs, [])

    assert done(redis) == [inflight.job.id for inflight in jobs]
    assert [stored(redis, inflight) for inflight in jobs] == [inflight.job.outcome for inflight in jobs]
    assert redis.hget("rq:worker:mac", "successful_job_count") == b"8"
    assert redis.info("commandstats")["cmdstat_evalsha"]["calls"] - calls == 2  # of 64 KiB and more


def test_an_outcome_in_parts_leaves_the_same_keys(redis: Redis, leases: Leases, writer: SuccessWriter):
    left = []
    for budget_bytes in (10**6, 5000):
        redis.flushdb()
        jobs = over(redis, leases, 50_000)
        job_id = jobs[0].job.id
        while jobs:
            assert exchange(redis, writer, jobs, budget_bytes).size_bytes <= budget_bytes + 300
            assert sum(redis.ttl(key) > 500 for key in uploads(redis)) == len(jobs) * (budget_bytes < 10**6)
        left.append(contents(redis, job_id))
    assert left[0] == left[1]
    assert left[0]["scorepool:outcome:ID"][0] == random.Random(0).randbytes(50_000)


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_outcome_arrives_once_and_whole_whatever_is_lost(redis: Redis, leases: Leases, data: st.DataObject):
    redis.flushdb()
    writer = SuccessWriter(redis, leases, 500)
    jobs = over(redis, leases, *data.draw(st.lists(st.integers(1, 40_000), min_size=1, max_size=5)))
    all_jobs, recorded = list(jobs), []
    faults = data.draw(st.lists(st.sampled_from(["message", "answer", "uploads", "scripts"]), max_size=8))
    while jobs:
        message = next_message(writer, jobs, data.draw(st.integers(1024, 30_000)))
        fault = faults.pop() if faults else None
        if fault == "message":
            continue
        if fault == "uploads":
            redis.delete("nothing", *uploads(redis))
        if fault == "scripts":
            redis.script_flush()
        answers = run_scripts(redis, message.calls)
        if fault != "answer":
            written = writer.apply(message, answers)
            recorded += written.recorded
            jobs = [inflight for inflight in jobs if inflight not in written.all]

    assert set(recorded) == set(all_jobs)
    assert sorted(done(redis)) == sorted(inflight.job.id for inflight in all_jobs)
    assert [stored(redis, inflight) for inflight in all_jobs] == [inflight.job.outcome for inflight in all_jobs]
    assert redis.hget("rq:worker:mac", "successful_job_count") == str(len(all_jobs)).encode()
    assert uploads(redis) == []


def test_small_results_do_not_wait_for_a_large_one_nor_it_for_them(redis: Redis, leases: Leases, writer: SuccessWriter):
    large, *small = over(redis, leases, 50_000, *[1000] * 20)
    jobs = [large, *small]
    message = exchange(redis, writer, jobs, 10_000)
    assert message.part_of is not None
    assert [success.inflight for success in message.ends] == small[:3]  # half of the message, with their bookkeeping
    jobs = [*small[3:], large]
    exchange(redis, writer, jobs, 10_000)
    assert len(jobs) < 15

    jobs = [large]
    for number in range(12):  # small ones keep coming
        jobs += over(redis, leases, *[1000] * 5) if number else []
        exchange(redis, writer, jobs, 10_000)
    assert large not in jobs
    assert stored(redis, large) == large.job.outcome


def test_an_upload_ends_with_its_lease(redis: Redis, leases: Leases, writer: SuccessWriter):
    jobs = over(redis, leases, 50_000)
    [inflight] = jobs
    exchange(redis, writer, jobs, 10_000)
    assert len(uploads(redis)) == 1

    redis.zrem("rq:wip:demo", inflight.lease_key)
    message = next_message(writer, jobs, 10_000)
    assert writer.apply(message, run_scripts(redis, message.calls)).lost == [inflight]
    assert uploads(redis) == []
    assert stored(redis, inflight) is None


def test_a_job_whose_answer_was_lost_counts_as_recorded_once(redis: Redis, leases: Leases, writer: SuccessWriter):
    jobs = over(redis, leases, 20_000, 20_000)
    run_scripts(redis, next_message(writer, jobs, 100_000).calls)

    again = next_message(writer, jobs, 100_000)
    assert writer.apply(again, run_scripts(redis, again.calls)).recorded == jobs
    in_parts = next_message(writer, jobs, 5_000)
    assert in_parts.part_of is not None
    assert writer.apply(in_parts, run_scripts(redis, in_parts.calls)).recorded == jobs[:1]

    assert len(done(redis)) == 2
    assert redis.hget("rq:worker:mac", "successful_job_count") == b"2"


def test_an_end_whose_smallest_message_fails_is_handed_back(redis: Redis, leases: Leases, writer: SuccessWriter):
    jobs = over(redis, leases, 50_000, 100)
    assert writer.fail(next_message(writer, jobs, 64_000), 100.0) == []
    for _ in range(2):
        assert writer.fail(next_message(writer, jobs, MIN_MESSAGE_BYTES), 9.0) == []
    exchange(redis, writer, jobs[:1], MIN_MESSAGE_BYTES)  # an answer: it counts from here
    assert writer.fail(next_message(writer, jobs[:1], MIN_MESSAGE_BYTES), 19.0) == []
    assert writer.fail(next_message(writer, jobs[:1], MIN_MESSAGE_BYTES), 1.0) == jobs[:1]


def test_a_write_goes_on_where_redis_was_lost(redis: Redis, redis_url: str, leases: Leases):
    jobs = over(redis, leases, *[100_000] * 6, 900_000)
    num_bytes = sum(len(inflight.job.outcome or b"") for inflight in jobs)
    with (
        Link(redis_url, up_bytes_s=500_000, delay_s=0.005) as link,
        Client.from_url(link.url, retry=Retry(NoBackoff(), 0)) as client,
    ):
        writer = SuccessWriter(client, leases, 500)
        load_scripts(client, writer.scripts)
        hole = threading.Timer(2.5, link.drop)
        hole.start()
        with pytest.raises(RedisError):
            writer.write(jobs, None, WorkerStatus.IDLE)
        hole.join()
        assert link.num_bytes_up > 500_000  # in the midst of it
        link.restore()
        for _ in range(5):  # connections of the hole stay half-open
            with suppress(RedisError):
                recorded, left = writer.write(jobs, None, WorkerStatus.IDLE)
                break
        assert (recorded, left) == (jobs, [])
        assert link.num_bytes_up < num_bytes + 700_000  # a second of the link, and buffers
    assert len(done(redis)) == 7
    assert [stored(redis, inflight) for inflight in jobs] == [inflight.job.outcome for inflight in jobs]
