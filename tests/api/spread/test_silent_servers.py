"""One server of two hangs: it takes connections and answers nothing. Commands for it would last 60 s in these tests.

What is asked of the other server, and whether a job is anywhere, is answered long before.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from redis import Redis
from redis.exceptions import TimeoutError as RedisTimeoutError

from scorepool import store
from scorepool.api.batches.line_jobs import LineJobs
from scorepool.api.repositories.models import FRESH_S
from tests.api.conftest import Serving, eventually, score
from tests.api.fake_worker import FakeWorker
from tests.api.spread.conftest import OtherServer
from tests.api.spread.test_outages import readiness

pytestmark = pytest.mark.anyio
SOON_S = 30


class Hanging:
    """A server that can be stopped."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@pytest.fixture
def hanging(other_server: OtherServer) -> Iterator[Hanging]:
    hanging = Hanging(other_server.process.pid)
    yield hanging
    hanging.go_on()


def state(http: httpx.AsyncClient) -> Any:
    return http._transport.app.state.scorepool  # type: ignore[attr-defined]


async def test_jobs_of_the_other_server_do_not_wait_for_one_that_has_just_begun_to_hang(
    spread: Serving, worker: FakeWorker, big: FakeWorker, hanging: Hanging
):
    async with spread() as http:
        await readiness(http, is_whole=True)
        await http.get("/v1/models")
        hanging.stop()
        async with asyncio.timeout(SOON_S):
            for _ in range(3):
                assert (await http.post("/v1/jobs", json=score())).status_code == 202
            assert [each["id"] for each in (await http.get("/v1/models")).json()["data"]] == ["big", "demo", "large"]
            await asyncio.sleep(FRESH_S)  # the models are read anew
            job_id = (await http.post("/v1/jobs", json=score())).json()["id"]
            assert (await http.get(f"/v1/jobs/{job_id}")).json()["status"] == "queued"


async def test_a_model_that_a_slow_server_has_got_meanwhile_is_found(
    spread: Serving, worker: FakeWorker, big: FakeWorker, hanging: Hanging
):
    async with spread() as http:
        assert (await http.get("/v1/models")).status_code == 200
        big.unregister()
        await asyncio.sleep(FRESH_S)
        assert (await http.post("/v1/jobs", json=score(model="big"))).status_code == 404
        big.register()
        hanging.stop()
        late = asyncio.create_task(http.post("/v1/jobs", json=score(model="big")))
        await asyncio.sleep(1)
        assert not late.done()
        hanging.go_on()
        assert (await late).status_code == 202


async def test_an_answer_is_given_up_when_its_server_is_found_to_be_silent_meanwhile(spread: Serving):
    async with spread() as http:
        await readiness(http, is_whole=True)
        asked = asyncio.create_task(state(http).reach.ask(1, asyncio.Event().wait()))
        await asyncio.sleep(0)
        state(http).parts[1].reader.is_silent = True
        async with asyncio.timeout(SOON_S):
            with pytest.raises(RedisTimeoutError, match=r"SCOREPOOL_REDIS_URLS\['big'\] does not answer"):
                await asked


async def test_what_may_be_on_a_server_that_hangs_is_soon_said_to_be_unavailable(
    spread: Serving, worker: FakeWorker, big: FakeWorker, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("scorepool.api.server.BLOCK_S", -58.0)  # of which the timeout of the streams' reader follows
    async with spread() as http:
        await readiness(http, is_whole=True)
        ids = [(await http.post("/v1/jobs", json=score(model=model))).json()["id"] for model in ("demo", "big")]
        hanging.stop()
        reader = state(http).parts[1].reader
        await eventually(lambda: reader.is_silent)
        async with asyncio.timeout(SOON_S):
            for path in (f"/v1/jobs/{'0' * 32}", f"/v1/jobs/{ids[1]}", "/v1/jobs", "/v1/webhooks/deliveries"):
                assert (await http.get(path)).status_code == 503
            assert (await http.post(f"/v1/jobs/{ids[1]}/cancel")).status_code == 503
            assert (await http.post("/v1/jobs", json=score(model="big"))).status_code == 503
            while "big" in {each["id"] for each in (await http.get("/v1/models")).json()["data"]}:  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # what was read a moment ago is used again
            assert (await http.get(f"/v1/jobs/{ids[0]}")).json()["status"] == "queued"
            assert "scorepool_redis_up 0.0" in (await http.get("/metrics")).text
            keyed = await http.post("/v1/jobs", json=score(), headers={"Idempotency-Key": "k"})
            assert keyed.status_code == 202
            line_jobs = LineJobs(state(http).servers, state(http).redis_servers, state(http).reach)
            worker.redis.hset(store.RqKeys.job(ids[0]), "status", "started")
            assert await line_jobs.statuses([*ids, "0" * 32]) == ["started", "queued", None]
        hanging.go_on()
        await readiness(http, is_whole=True)
        found = [(await http.get(path)).status_code for path in (f"/v1/jobs/{'0' * 32}", f"/v1/jobs/{ids[1]}")]
        assert found == [404, 200]


async def test_a_pause_that_one_server_cannot_take_holds_on_none(
    spread: Serving, redis: Redis, other: Redis, other_server: OtherServer
):
    async with spread() as http:
        other_server.kill()
        try:
            assert (await http.post("/pause?mode=keep&clear_cache=false")).status_code == 503
        finally:
            other_server.start()
        assert [server.exists(store.Keys.paused) for server in (redis, other)] == [0, 0]


async def test_a_pause_ends_on_the_servers_that_answer(
    serving: Serving, redis: Redis, other: Redis, other_server: OtherServer, redis_url: str
):
    """Home is down here."""
    async with serving(redis_url=other_server.url, redis_urls=f'{{"demo": "{redis_url}"}}') as http:
        assert (await http.post("/pause?mode=keep&clear_cache=false")).status_code == 200
        assert redis.exists(store.Keys.paused)
        other_server.kill()
        try:
            assert (await http.post("/resume")).status_code == 503
        finally:
            other_server.start()
        assert not redis.exists(store.Keys.paused)
        assert (await http.post("/resume")).status_code == 200
        assert not other.exists(store.Keys.paused)
