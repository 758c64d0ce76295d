"""The worker reports how far score and classify jobs are, about once a second, and once for all of them."""

from collections.abc import Iterator

import pytest
from redis import Redis

from scorepool import store, wire
from scorepool.engine import Sequence
from scorepool.engine.errors import EngineError
from scorepool.worker.inference import job_progress
from scorepool.worker.inference.job_progress import JobProgress
from scorepool.worker.inference.token_publisher import TokenPublisher
from tests.worker.conftest import until

EVERY_S = 0.1


@pytest.fixture
def publisher(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenPublisher]:
    monkeypatch.setattr(job_progress, "PROGRESS_EVERY_S", EVERY_S)
    publisher = TokenPublisher(redis)
    yield publisher
    publisher.close()


def sequences(*lengths: int) -> list[Sequence]:
    return [Sequence(token_ids=[5] * length, score_from=1) for length in lengths]


def compute(sequence: Sequence, num_tokens: int) -> None:
    """Compute the next tokens of a sequence, as the engine does."""
    sequence.num_computed += num_tokens
    sequence.columns.logprobs += [-1.0] * min(num_tokens, sequence.num_input_tokens - 1 - len(sequence.columns))


def start(publisher: TokenPublisher, job: JobProgress) -> JobProgress:
    publisher.running_jobs.add(job)
    publisher.notify()
    return job


def written(redis: Redis) -> list[wire.Progresses]:
    entries = [fields for _, fields in redis.xrange(store.TOKENS)]
    assert all(wire.parse(fields[b"step"], wire.TokenDeltas, "msgpack") == [] for fields in entries)
    return [wire.parse(fields[b"progress"], wire.Progresses, "msgpack") for fields in entries]


def test_items_and_tokens_are_counted_as_they_are_computed():
    first, second, third = items = sequences(10, 100, 5)
    job = JobProgress("j", items, num_failed=2, run=7)
    assert job.read() is None

    compute(first, 10)
    compute(second, 40)
    found = job.read()
    assert found == wire.Progress(id="j", run=7, num_items=5, num_items_done=3, num_tokens=115, num_tokens_done=50)
    assert job.read() is None
    second.num_computed = 0  # its cache was dropped
    assert job.read() is None
    third.error = EngineError("it failed alone")
    compute(second, 100)
    found = job.read()
    assert found is not None
    assert (found.num_items_done, found.num_tokens_done) == (5, 115)


def test_all_jobs_are_reported_together_at_a_bounded_rate(redis: Redis, publisher: TokenPublisher):
    jobs = {name: sequences(1000) for name in ("a", "b", "c")}
    for name, items in jobs.items():
        start(publisher, JobProgress(name, items))
    for _ in range(200):
        for (item,) in jobs.values():
            compute(item, 1)
    until(lambda: len(written(redis)) == 1)

    (entry,) = written(redis)
    assert {progress.id for progress in entry} == {"a", "b", "c"}
    for (item,) in jobs.values():
        compute(item, 799)
    until(lambda: {progress.num_tokens_done for progress in written(redis)[-1]} == {1000})
    first, last = (entry_id for entry_id, _ in (redis.xrange(store.TOKENS)[0], redis.xrange(store.TOKENS)[-1]))
    assert int(last.split(b"-")[0]) - int(first.split(b"-")[0]) >= EVERY_S * 900


def test_nothing_is_written_of_jobs_that_end_soon_or_stand_still(redis: Redis, publisher: TokenPublisher):
    short, idle, running = sequences(10, 10, 10)
    publisher.running_jobs.remove(start(publisher, JobProgress("short", [short])))
    start(publisher, JobProgress("idle", [idle]))
    start(publisher, JobProgress("running", [running]))
    for item in (short, running):
        compute(item, 5)
    until(lambda: written(redis))
    compute(running, 1)
    until(lambda: len(written(redis)) == 2)

    assert {progress.id for entry in written(redis) for progress in entry} == {"running"}


def test_progress_of_the_time_without_redis_is_superseded(publisher: TokenPublisher, redis: Redis):
    (item,) = sequences(1000)
    start(publisher, JobProgress("j", [item]))
    redis.execute_command("CLIENT", "PAUSE", int(EVERY_S * 4000), "WRITE")
    for _ in range(4):
        compute(item, 100)
        until(lambda: True)
    until(lambda: written(redis))
    compute(item, 1)
    until(lambda: written(redis)[-1][0].num_tokens_done == 401)
