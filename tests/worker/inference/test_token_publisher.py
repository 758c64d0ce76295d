"""The publisher writes the tokens of streaming jobs to Redis without delaying the engine, and loses none."""

import itertools
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from scorepool import store, wire
from scorepool.engine import Sampling, Sequence
from scorepool.local.redis_server import RedisServer
from scorepool.worker.inference import token_publisher
from scorepool.worker.inference.job_stream import JobStream
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.token_publisher import TokenPublisher
from tests.fleet.link import Link
from tests.worker.conftest import Workers, submit, until
from tests.worker.fake import FakeChatCodec, FakeTokenizer

CODEC = FakeChatCodec(FakeTokenizer())
LONG_S = 200.0  # a timeout that no busy machine reaches: nothing may wait for it


class Running:
    """A job of one sequence that streams."""

    def __init__(self, publisher: TokenPublisher, job_id: str = "j", top_logprobs: int = 0) -> None:
        sampling = Sampling(max_tokens=1_000_000)
        self.sequence = Sequence(token_ids=[112], top_logprobs=top_logprobs, sampling=sampling)
        prepared = PreparedSequence(self.sequence, 1, False, False)
        self.stream = JobStream(job_id, [prepared], True, CODEC, run=7)
        self.publisher = publisher
        publisher.add(self.stream)

    def generate(self, num_tokens: int = 1) -> None:
        """Generate tokens in one step: 0, 1, 2, ..., 199, 0, ..."""
        sequence = self.sequence
        new = [(sequence.num_generated + index) % 200 for index in range(num_tokens)]
        sequence.token_ids += new
        sequence.text += bytes(new)
        sequence.columns.logprobs += [-1.0] * num_tokens
        sequence.columns.top_ids += [[*range(sequence.top_logprobs)]] * num_tokens if sequence.top_logprobs else []
        sequence.columns.top_logprobs += [[-1.0] * sequence.top_logprobs] * num_tokens if sequence.top_logprobs else []
        self.stream.on_step([sequence])
        self.publisher.put(self.stream)


def entries(redis: Redis) -> list[wire.TokenDeltas]:
    return [wire.parse(fields[b"step"], wire.TokenDeltas, "msgpack") for _, fields in redis.xrange(store.TOKENS)]


def written(redis: Redis, job_id: str = "j") -> list[int]:
    """Return the tokens of a job. Each delta must begin where the one before it ends, or before."""
    ids: list[int] = []
    for delta in (delta for entry in entries(redis) for delta in entry if delta.id == job_id):
        assert delta.first <= len(ids)
        assert delta.run == 7
        ids[delta.first :] = delta.token_ids
    return ids


def numbers(count: int) -> list[int]:
    return [index % 200 for index in range(count)]


@pytest.fixture
def publisher(redis: Redis) -> Iterator[TokenPublisher]:
    publisher = TokenPublisher(redis)
    yield publisher
    publisher.close()


def test_tokens_that_come_during_a_write_become_one_entry(redis: Redis):
    publisher = TokenPublisher(redis)
    jobs = [Running(publisher, name) for name in ("j", "other")]
    redis.execute_command("CLIENT", "PAUSE", 600_000, "WRITE")
    for _ in range(5):
        for job in jobs:
            job.generate()
    redis.execute_command("CLIENT", "UNPAUSE")
    until(lambda: sum(map(len, (written(redis, name) for name in ("j", "other")))) == 10)
    publisher.close()

    assert len(entries(redis)) <= 3
    assert len(entries(redis)[-1]) == 2


def test_streamed_tokens_are_not_written_to_disk(tmp_path: Path):
    with RedisServer(tmp_path / "r") as server, Redis.from_url(server.url) as redis:
        publisher = TokenPublisher(redis)
        before = redis.info("persistence")["aof_current_size"]

        Running(publisher).generate()
        publisher.close()

        assert redis.xlen(store.TOKENS) == 1
        assert redis.info("persistence")["aof_current_size"] == before
        redis.set("another key", "written")
        assert redis.info("persistence")["aof_current_size"] > before


def test_tokens_of_the_time_without_redis_are_written_when_it_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    with RedisServer(tmp_path / "r") as server, Redis.from_url(server.url) as redis:
        publisher = TokenPublisher(redis)
        job = Running(publisher)
        job.generate()
        until(lambda: redis.xlen(store.TOKENS) == 1)
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        for _ in range(5):
            job.generate()
        until(lambda: "are kept until Redis answers" in caplog.text)
        server.start()
        until(lambda: redis.xlen(store.TOKENS) > 0)
        publisher.close()

        assert [(delta.first, delta.token_ids) for entry in entries(redis) for delta in entry] == [(1, [1, 2, 3, 4, 5])]
        until(lambda: "token deltas are written again" in caplog.text)
    assert caplog.text.count("cannot be written") == 1


def test_a_half_open_connection_is_given_up_soon_and_nothing_is_lost(redis: Redis, redis_url: str):
    with Link(redis_url) as link, Redis.from_url(link.url, socket_timeout=LONG_S) as remote:
        publisher = TokenPublisher(remote)
        job = Running(publisher)
        for count in range(1, 11):
            job.generate()
            until(lambda count=count: len(written(redis)) == count)
        link.drop()
        job.generate()
        time.sleep(2)
        link.restore()
        job.generate()
        until(lambda: len(written(redis)) == 12)
        publisher.close()
    assert written(redis) == numbers(12)


def test_a_write_whose_reply_was_lost_is_repeated(redis: Redis, redis_url: str):
    with Link(redis_url) as link, Redis.from_url(link.url, socket_timeout=10) as remote:
        publisher = TokenPublisher(remote)
        job = Running(publisher)
        job.generate()
        until(lambda: len(written(redis)) == 1)
        link.lose_next_reply(lambda _: True)
        job.generate()
        until(lambda: len(entries(redis)) == 3)
        publisher.close()

    assert [(delta.first, delta.token_ids) for entry in entries(redis) for delta in entry] == [
        (0, [0]),
        (1, [1]),
        (1, [1]),
    ]


def test_a_backlog_is_written_in_entries_of_limited_size(redis: Redis, publisher: TokenPublisher):
    job = Running(publisher, top_logprobs=20)
    job.generate(10_000)  # 3 MB
    until(lambda: len(written(redis)) == 10_000)

    sizes = [len(fields[b"step"]) for _, fields in redis.xrange(store.TOKENS)]
    assert max(sizes) <= token_publisher.MAX_ENTRY_BYTES
    assert len(sizes) < 100
    assert written(redis) == numbers(10_000)


def test_a_backlog_passes_a_narrow_link(redis: Redis, redis_url: str):
    with Link(redis_url) as link, Redis.from_url(link.url, socket_timeout=10) as remote:
        publisher = TokenPublisher(remote)
        job = Running(publisher)
        job.generate()
        until(lambda: len(written(redis)) == 1)
        link.change(up_bytes_s=20_000.0)
        job.generate(5_000)  # about 75 KB
        until(lambda: len(written(redis)) == 5_001)
        publisher.close()
    assert written(redis) == numbers(5_001)


def test_a_long_backlog_of_one_job_does_not_hold_back_another(redis: Redis, redis_url: str):
    with Link(redis_url) as link, Redis.from_url(link.url, socket_timeout=10) as remote:
        publisher = TokenPublisher(remote)
        job, other = Running(publisher), Running(publisher, "other")
        job.generate()
        until(lambda: len(written(redis)) == 1)
        link.change(up_bytes_s=50_000.0)
        job.generate(20_000)  # 300 KB
        other.generate()
        until(lambda: written(redis, "other"))

        before = itertools.takewhile(lambda entry: all(delta.id == "j" for delta in entry), entries(redis))
        assert sum(len(delta.token_ids) for entry in before for delta in entry) < 15_000
        publisher.close()


def test_missing_tokens_are_written_again(redis: Redis, publisher: TokenPublisher, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(token_publisher, "ASK_EVERY_S", 0.0)
    job = Running(publisher)
    for count in range(1, 6):
        job.generate()
        until(lambda count=count: len(written(redis)) == count)
    redis.delete(store.TOKENS)
    asked = [("j", 0, 2), ("j", 0, 3), ("j", 5, 0), ("elsewhere", 0, 0)]
    bodies = [wire.encode(wire.MissingTokens(id=name, sequence=index, first=first)) for name, index, first in asked]
    redis.sadd(store.Keys.missing_tokens, *bodies, b"\xc1", wire.encode({"id": "j", "sequence": 0, "first": -1}))
    job.generate()
    until(lambda: len(entries(redis)) == 2)

    (late,), (repeated,) = entries(redis)
    assert (late.first, late.token_ids) == (5, [5])
    assert (repeated.first, repeated.token_ids) == (2, [2, 3, 4, 5])
    assert redis.smembers(store.Keys.missing_tokens) == {bodies[3], b"\xc1"}  # not of this worker, not readable


def test_missing_tokens_are_asked_for_now_and_then(redis: Redis, publisher: TokenPublisher):
    job = Running(publisher)
    job.generate()
    until(lambda: written(redis) == [0])
    redis.delete(store.TOKENS)
    redis.sadd(store.Keys.missing_tokens, wire.encode(wire.MissingTokens(id="j", sequence=0, first=0)))
    until(lambda: (job.generate(), any(delta.first == 0 for entry in entries(redis) for delta in entry))[1])


def test_a_key_of_a_wrong_type_stops_no_tokens(redis: Redis, publisher: TokenPublisher):
    redis.set(store.Keys.missing_tokens, "a string")
    Running(publisher).generate()

    until(lambda: written(redis) == [0])


def test_a_removed_stream_is_written_no_more(redis: Redis, publisher: TokenPublisher):
    job = Running(publisher)
    publisher.remove(job.stream)
    job.generate()
    Running(publisher, "other").generate()
    until(lambda: written(redis, "other"))

    assert written(redis) == []


def test_a_dead_link_delays_neither_a_step_nor_the_close(redis: Redis, redis_url: str):
    with Link(redis_url) as link, Redis.from_url(link.url, socket_timeout=LONG_S) as remote:
        publisher = TokenPublisher(remote)
        job = Running(publisher)
        link.drop()
        started_at = time.monotonic()
        for _ in range(100):
            job.generate()
        publisher.close()

        assert time.monotonic() - started_at < LONG_S / 2


def test_a_step_without_new_tokens_sends_nothing(redis: Redis, publisher: TokenPublisher):
    def num_scripts() -> int:
        stats = redis.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))

    job = Running(publisher)
    job.generate()
    until(lambda: written(redis) == [0])
    before = num_scripts()
    for _ in range(5):
        publisher.put(job.stream)
        time.sleep(0.02)
    job.generate()
    until(lambda: written(redis) == [0, 1])

    assert num_scripts() == before + 1


def test_an_error_in_one_stream_does_not_end_the_others(
    redis: Redis, publisher: TokenPublisher, caplog: pytest.LogCaptureFixture
):
    broken, whole = Running(publisher, "broken"), Running(publisher)
    broken.sequence.token_ids.append(97)
    broken.sequence.text += b"a"
    broken.sequence.columns.logprobs.append("no number")  # type: ignore[arg-type]
    broken.generate()
    until(lambda: "token deltas were not written" in caplog.text)
    whole.generate()

    until(lambda: written(redis) == [0])


def test_a_job_that_does_not_stream_publishes_nothing(workers: Workers, redis: Redis):
    workers.start("--burst")
    job_id = submit(redis, wire.Generate(model="demo", prompt="a", max_tokens=3))
    until(lambda: redis.exists(store.Keys.outcome(job_id)))

    assert redis.xlen(store.TOKENS) == 0
