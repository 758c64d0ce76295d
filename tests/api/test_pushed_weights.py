"""A push of weights whose answer from Redis is lost is one push, and keeps what was sent."""

import time
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from scorepool import wire
from scorepool.api.repositories.weights import Weights
from scorepool.store import Keys
from scorepool.store.scripts import load
from tests.api.conftest import Serving
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio
HEADER = b"{}"
FILE = len(HEADER).to_bytes(8, "little") + HEADER


def test_a_push_that_is_sent_again_is_answered_like_the_first(redis: Redis):
    redis.zadd(Keys.weights_workers("demo"), {"w1": time.time() + 60})
    first, other = (wire.encode(wire.WeightsSource(id=id_, path="/weights")) for id_ in ("a", "b"))

    def push(source: bytes) -> list[Any]:
        answer: Any = redis.eval(load("push_weights.lua"), 0, "demo", "", source, "")
        return answer

    assert push(first) == push(first) == [b"pushed", 1]
    assert push(other) == [b"pending", 1]
    redis.eval(load("report_weights.lua"), 0, "demo", "w1", "1", "a", "fingerprint", "")
    assert redis.hget(Keys.weights("demo"), "version") == b"1"
    assert push(first) == [b"pushed", 1]
    assert push(other) == [b"pushed", 2]


async def test_an_upload_is_kept_if_nobody_knows_whether_its_push_ran(
    serving: Serving, worker: FakeWorker, redis: Redis, monkeypatch: pytest.MonkeyPatch
):
    push = Weights.push

    async def lose(*args: Any) -> int:
        await push(*args)
        raise RedisConnectionError("lost")

    monkeypatch.setattr(Weights, "push", lose)
    redis.zadd(Keys.weights_workers("demo"), {"w1": time.time() + 60})
    async with serving() as http:
        octets = {"Content-Type": "application/octet-stream"}
        reply = await http.post("/v1/models/demo/weights", content=FILE, headers=octets)
        assert reply.status_code == 503
        [upload] = redis.keys(Keys.weights_upload("*"))
        assert redis.ttl(upload) == -1

        monkeypatch.setattr(Weights, "push", push)
        assert (await http.post("/v1/models/demo/weights", content=FILE, headers=octets)).status_code == 409
        assert redis.keys(Keys.weights_upload("*")) == [upload]
