"""The publisher writes the tokens of streaming jobs to Redis without delaying the engine."""

import threading
from pathlib import Path

import pytest
from redis import Redis

from scorepool import store, wire
from scorepool.local.redis_server import RedisServer
from scorepool.worker.inference.token_publisher import TokenPublisher
from tests.worker.conftest import Workers, submit, until

DELTA = wire.TokenDelta(id="j", sequence=0, first=0, token_ids=[1], token_bytes=[b"a"])


def test_deltas_since_the_last_entry_become_one_entry(redis: Redis):
    publisher = TokenPublisher(redis)
    is_writing, may_continue = threading.Event(), threading.Event()

    def slow() -> wire.TokenDelta:
        is_writing.set()
        assert may_continue.wait(60)
        return DELTA

    publisher.put([slow])
    assert is_writing.wait(60)
    for _ in range(5):
        publisher.put([lambda: DELTA])
    may_continue.set()
    publisher.close()

    steps = [wire.parse(fields[b"step"], wire.TokenDeltas, "msgpack") for _, fields in redis.xrange(store.TOKENS)]
    assert [len(step) for step in steps] == [1, 5]


def test_streamed_tokens_are_not_written_to_disk(tmp_path: Path):
    with RedisServer(tmp_path / "r") as server, Redis.from_url(server.url) as redis:
        publisher = TokenPublisher(redis)
        before = redis.info("persistence")["aof_current_size"]

        publisher.put([lambda: DELTA])
        publisher.close()

        assert redis.xlen(store.TOKENS) == 1
        assert redis.info("persistence")["aof_current_size"] == before
        redis.set("another key", "written")
        assert redis.info("persistence")["aof_current_size"] > before


def test_deltas_of_the_time_without_redis_are_dropped_and_later_ones_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with RedisServer(tmp_path / "r") as server, Redis.from_url(server.url) as redis:
        publisher = TokenPublisher(redis)
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        publisher.put([lambda: DELTA])
        until(lambda: "1 token deltas were not streamed" in caplog.text)
        server.start()

        publisher.put([lambda: DELTA])
        publisher.close()

        assert redis.xlen(store.TOKENS) == 1


def test_a_job_that_does_not_stream_publishes_nothing(workers: Workers, redis: Redis):
    workers.start("--burst")
    job_id = submit(redis, wire.Generate(model="demo", prompt="a", max_tokens=3))
    until(lambda: redis.exists(store.Keys.outcome(job_id)))

    assert redis.xlen(store.TOKENS) == 0
