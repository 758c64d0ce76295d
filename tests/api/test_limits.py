"""Bodies and queues have limits: a request is accepted whole or not at all, and the reply says when to retry."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis import Redis
from starlette.types import Message, Receive, Scope, Send

from scorepool.api.http import bodies
from tests.api.conftest import Serving, generate, score, trickle
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio
JSON = {"Content-Type": "application/json"}


async def test_a_chunked_body_is_cut_off_at_the_limit(serving: Serving, worker: FakeWorker):
    """Nothing beyond the limit is read before the reply, without Content-Length either."""
    num_sent = 0
    num_sent_at_reply: list[int] = []

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal num_sent
        for _ in range(1000):
            num_sent += 1
            yield b" " * 1000

    async def recording(scope: Scope, receive: Receive, send: Send) -> None:
        async def record(message: Message) -> None:
            if message["type"] == "http.response.start":
                num_sent_at_reply.append(num_sent)
            await send(message)

        await app(scope, receive, record)

    async with serving(max_body_bytes=5000) as http:
        app, http._transport.app = http._transport.app, recording
        for path in ("/v1/jobs", "/v1/jobs/bulk"):
            num_sent = 0
            reply = await http.post(path, content=chunks(), headers=JSON)
            assert (reply.status_code, reply.json()["error"]["code"]) == (413, "too_large")
            assert reply.headers["connection"] == "close"
    assert num_sent_at_reply == [6, 6]


async def test_a_body_that_comes_too_slowly_is_refused(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    """A client keeps its connection only while it sends fast enough."""
    monkeypatch.setattr(bodies, "BODY_GRACE_S", 0.3)

    async with serving() as http, asyncio.timeout(60):
        reply = await http.post("/v1/jobs", content=trickle(), headers=JSON)
    assert (reply.status_code, reply.json()["error"]["code"]) == (408, "too_slow")
    assert reply.headers["connection"] == "close"


async def test_a_content_length_is_used_only_to_refuse_early(serving: Serving, worker: FakeWorker):
    async with serving(max_body_bytes=5000) as http:
        claims_much = await http.post("/v1/jobs", content=b"{}", headers=JSON | {"Content-Length": "5001"})
        claims_little = await http.post("/v1/jobs", content=b" " * 5001, headers=JSON | {"Content-Length": "10"})
        fits = await http.post("/v1/jobs", content=b" " * 4000 + b"{}", headers=JSON)
    assert [reply.status_code for reply in (claims_much, claims_little, fits)] == [413, 413, 400]


async def test_a_full_queue_is_429_and_accepts_nothing_of_a_bulk(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving(max_queue_depth=5) as http:
        first = await http.post("/v1/jobs/bulk", json=[score()] * 4)
        too_many = await http.post("/v1/jobs/bulk", json=[score()] * 2 + [score(priority="high")])
        other_queue = await http.post("/v1/jobs", json=score(priority="low"))
        last = await http.post("/v1/jobs", json=score())
        over = await http.post("/v1/jobs", json=score())
    assert [reply.status_code for reply in (first, too_many, other_queue, last, over)] == [202, 429, 202, 202, 429]
    assert redis.llen("rq:queue:demo") == 5
    assert redis.llen("rq:queue:demo:high") == 0
    assert int(over.headers["retry-after"]) >= 1
    assert over.json()["error"]["code"] == "queue_full"
    assert "more than 5 (SCOREPOOL_MAX_QUEUE_DEPTH)" in over.json()["error"]["message"]


async def test_the_depth_limit_holds_for_concurrent_submissions(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving(max_queue_depth=7) as http:
        replies = await asyncio.gather(*(http.post("/v1/jobs", json=score()) for _ in range(30)))
    statuses = [reply.status_code for reply in replies]
    assert (statuses.count(202), statuses.count(429)) == (7, 23)
    assert redis.llen("rq:queue:demo") == 7


def expiry(redis: Redis, ago_s: float) -> float:
    """Return the expiry in its registry of a job that ended `ago_s` ago."""
    seconds, microseconds = redis.time()
    return seconds + microseconds / 1e6 - ago_s + 86_400


@pytest.mark.parametrize("num_drained", [30, 5, 1, 600])
async def test_retry_after_follows_how_many_jobs_ended_in_the_last_minute(
    serving: Serving, worker: FakeWorker, redis: Redis, num_drained: int
):
    """Jobs ended in the last half minute, and none before."""
    began = time.monotonic()
    for index in range(num_drained):
        redis.zadd("rq:finished:demo", {f"new{index}": expiry(redis, 29.5 * (1 - index / num_drained))})
        redis.zadd("rq:finished:demo", {f"old{index}": expiry(redis, 90)})
    async with serving(max_queue_depth=1) as http:
        await http.post("/v1/jobs", json=score())
        reply = await http.post("/v1/jobs", json=score())
    late_s = time.monotonic() - began
    assert reply.status_code == 429
    least, most = math.ceil(29.5 / num_drained), math.ceil((29.5 + late_s) / num_drained)
    assert least <= int(reply.headers["retry-after"]) <= most


async def test_retry_after_is_five_seconds_if_no_job_ended(serving: Serving, worker: FakeWorker):
    async with serving(max_queue_depth=1) as http:
        await http.post("/v1/jobs", json=score())
        reply = await http.post("/v1/jobs", json=score())
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "5")


async def test_retry_after_is_right_within_a_factor_of_two(serving: Serving, worker: FakeWorker, redis: Redis):
    """The worker has ended 20 jobs a second for three seconds. RQ stores whole seconds."""
    async with serving(max_queue_depth=200) as http:
        assert (await http.post("/v1/jobs/bulk", json=[score()] * 140)).status_code == 202
        began = time.monotonic()
        ends = [int(expiry(redis, 3 - index / 20)) for index in range(60)]
        redis.zadd("rq:finished:demo", {str(index): at for index, at in enumerate(ends)})
        refused = await http.post("/v1/jobs/bulk", json=[score()] * 140)
    late_s = time.monotonic() - began
    assert refused.status_code == 429
    takes_s = 80 / 20
    assert takes_s / 2 <= int(refused.headers["retry-after"]) <= takes_s * 2 + math.ceil(80 * late_s / 60)


async def test_a_bulk_that_can_never_fit_is_413(serving: Serving, worker: FakeWorker):
    async with serving(max_queue_depth=2) as http:
        reply = await http.post("/v1/jobs/bulk", json=[score()] * 3)
    assert reply.status_code == 413
    assert "at most 2 (SCOREPOOL_MAX_QUEUE_DEPTH)" in reply.json()["error"]["message"]


async def test_a_synchronous_request_that_can_never_fit_its_queue_is_413(serving: Serving, worker: FakeWorker):
    async with serving(max_bulk_jobs=3, max_queue_depth=2) as http:
        reply = await http.post("/v1/completions", json={"model": "demo", "prompt": ["a"] * 3})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (413, "prompt")
    assert "at most 2 prompts in one request (SCOREPOOL_MAX_QUEUE_DEPTH), found 3" in error["message"]


async def test_a_bulk_looks_for_workers_at_most_once(serving: Serving, redis: Redis):
    async with serving() as http:
        redis.config_resetstat()
        bodies = [score(model=f"m{index}", wait_for_model=True) for index in range(50)]
        assert (await http.post("/v1/jobs/bulk", json=bodies)).status_code == 202
        assert redis.info("commandstats")["cmdstat_zrange"]["calls"] == 2  # live and recent models, in one round trip


async def test_a_bulk_of_a_thousand_is_one_round_trip(serving: Serving, worker: FakeWorker, redis: Redis):
    async with serving() as http:
        await http.post("/v1/jobs", json=score())  # loads the script
        redis.config_resetstat()
        reply = await http.post("/v1/jobs/bulk", json=[score(webhook="https://example.com/")] * 1000)
        stats = redis.info("commandstats")
    assert reply.status_code == 202
    assert stats["cmdstat_evalsha"]["calls"] == 1
    assert redis.llen("rq:queue:demo") == 1001


@pytest.mark.parametrize(
    ("body", "field", "found"),
    [
        (generate(n=128, top_logprobs=128, max_tokens=2000), "top_logprobs", "256000 tokens with 128 each"),
        (generate(n=128, max_tokens=100_000), "n", "12800000 tokens"),
        (score(items=[{"prompt": "a", "completion": "b" * 12_000}] * 1000, top_logprobs=8), "top_logprobs", "3000000"),
    ],
)
async def test_what_a_result_may_report_is_bounded_before_the_job_is_accepted(
    serving: Serving, worker: FakeWorker, body: dict[str, Any], field: str, found: str
):
    worker.register(context_length=131_072)
    async with serving() as http:
        for path, sent, where in (("/v1/jobs", body, ""), ("/v1/jobs/bulk", [generate(), body], "[1].")):
            reply = await http.post(path, json=sent)
            error = reply.json()["error"]
            assert (reply.status_code, error["code"], error["field"]) == (413, "too_large", where + field)
            assert found in error["message"]
        assert worker.waiting() == set()
        accepted = generate(n=16, top_logprobs=20, max_tokens=8192)
        assert (await http.post("/v1/jobs", json=accepted)).status_code == 202
