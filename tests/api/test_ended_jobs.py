"""Many small results come with one request, in the order that the client asks for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from rq.job import JobStatus

from scorepool import AsyncClient, JobTimeout, ScorepoolError, wire
from scorepool.api import submission
from scorepool.api.http import held_bytes, large_replies
from scorepool.wire.stored_result import StoredResult
from tests.api.conftest import ALICE, BOB, KEYS, Serving, bearer, eventually, score
from tests.api.fake_worker import RESULT, FakeWorker

pytestmark = pytest.mark.anyio
ENDED = "/v1/jobs/ended"
FAILURE = wire.Failure(code="numeric", message="NaN")
STORED = StoredResult(execution="e", num_bytes=10**9, num_sequences=1)


async def submit(http: httpx.AsyncClient, count: int) -> list[str]:
    return [job["id"] for job in (await http.post("/v1/jobs/bulk", json=[score()] * count)).json()]


async def ended(http: httpx.AsyncClient, ids: list[str], **params: Any) -> list[dict[str, Any]]:
    reply = await http.get(ENDED, params={"ids": ",".join(ids)} | params)
    assert reply.status_code == 200, reply.text
    return reply.json()


@asynccontextmanager
async def sdk_of(http: httpx.AsyncClient) -> AsyncIterator[AsyncClient]:
    """Give the SDK, which sends its requests to the application of `http`."""
    async with AsyncClient("http://127.0.0.1:8000") as sdk:
        headers, transport = sdk._connection.http.headers, http._transport
        sdk._connection.http = httpx.AsyncClient(transport=transport, base_url=http.base_url, headers=headers)
        yield sdk


async def test_the_jobs_that_have_ended_come_in_order_up_to_the_first_that_has_not(
    serving: Serving, worker: FakeWorker
):
    async with serving() as http:
        ids = await submit(http, 5)
        assert await ended(http, ids) == []
        worker.end(ids[1], FAILURE, JobStatus.FAILED)
        worker.end(ids[4])
        assert await ended(http, ids) == []
        worker.end(ids[0])
        found = await ended(http, ids)
        assert found == [(await http.get(f"/v1/jobs/{job_id}")).json() for job_id in ids[:2]]
        assert [(job["status"], bool(job["result"])) for job in found] == [("finished", True), ("failed", False)]
        worker.start(ids[2])
        assert [job["id"] for job in await ended(http, [ids[4], ids[0], ids[3], ids[1]])] == [ids[4], ids[0]]
        reply = await http.get(ENDED, params={"ids": ids[0]}, headers={"Accept": "application/msgpack"})
        assert wire.parse(reply.content, list[wire.Job], "msgpack")[0].result is not None


async def test_it_waits_for_the_first(serving: Serving, worker: FakeWorker):
    async with serving(max_wait_s=60) as http:
        ids = await submit(http, 2)
        waiting = asyncio.create_task(ended(http, ids, wait=60))
        await eventually(lambda: len(http._transport.app.state.scorepool.waiting) == 1)  # type: ignore[attr-defined]
        worker.end(ids[1])
        assert not waiting.done()
        worker.end(ids[0])
        assert [job["id"] for job in await waiting][:1] == ids[:1]
        [late] = await submit(http, 1)
        assert await ended(http, [late], wait=0.01) == []
        worker.end(late)
        reply = await http.get(ENDED, params={"ids": late, "wait": 1000})
        assert (len(reply.json()), reply.headers["preference-applied"]) == (1, "wait=60")


async def test_jobs_of_others_are_absent(serving: Serving, worker: FakeWorker):
    async with serving(api_keys=KEYS) as http:
        reply = await http.post("/v1/jobs", json=score(), headers=bearer(ALICE))
        of_alice = reply.json()["id"]
        of_bob = (await http.post("/v1/jobs", json=score(), headers=bearer(BOB))).json()["id"]
        for job_id in (of_alice, of_bob):
            worker.end(job_id)
        for foreign in (of_alice, "0" * 32, "a/b"):
            refused = await http.get(ENDED, params={"ids": f"{foreign},{of_bob}"}, headers=bearer(BOB))
            assert (refused.status_code, refused.json()["error"]["field"]) == (404, "id")
            found = await http.get(ENDED, params={"ids": f"{of_bob},{foreign}"}, headers=bearer(BOB))
            assert [job["id"] for job in found.json()] == [of_bob]


@pytest.mark.parametrize(
    "query", ["", "?ids=", f"?ids={','.join(['0' * 32] * (wire.MAX_ENDED_JOBS + 1))}", "?ids=a&ids=b"]
)
async def test_bad_ids_are_refused_by_name(serving: Serving, query: str):
    async with serving() as http:
        reply = await http.get(f"{ENDED}{query}")
    assert (reply.status_code, reply.json()["error"]["field"]) == (400, "ids")


async def test_a_list_holds_few_bytes(serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch):
    async with serving() as http:
        ids = await submit(http, 4)
        for job_id, outcome in zip(ids, (RESULT, RESULT, STORED, RESULT), strict=True):
            worker.end(job_id, outcome)
        found = await ended(http, ids)
        assert [(job["status"], bool(job["result"])) for job in found] == [("finished", True)] * 2 + [
            ("finished", False)
        ]
        assert [job["id"] for job in await ended(http, ids[2:])] == ids[2:3]
        with large_replies.held_results("local") as held:
            monkeypatch.setattr(held_bytes, "FREE_BYTES", len(wire.encode(RESULT)))
            held.add(large_replies.MAX_BYTES_OF_OWNER - 1)
            assert [job["id"] for job in await ended(http, ids)] == ids[:1]
        monkeypatch.setattr(submission, "MAX_ENDED_BYTES", 1)
        assert [job["id"] for job in await ended(http, ids)] == ids[:1]


async def test_the_sdk_yields_every_job_once_in_order(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wire, "MAX_ENDED_JOBS", 7)
    async with serving() as http, sdk_of(http) as sdk:
        jobs = await sdk.submit_many(
            [wire.Score(model="demo", items=[wire.ScoreItem(prompt="a", completion="b")])] * 40
        )
        ids = [job.id for job in jobs]

        async def work() -> None:
            for job_id in [*ids[20:], *ids[:20]]:
                outcome, status = (FAILURE, JobStatus.FAILED) if job_id == ids[5] else (RESULT, JobStatus.FINISHED)
                worker.end(job_id, outcome, status)
                await asyncio.sleep(0.001)

        working = asyncio.create_task(work())
        found = [job async for job in sdk.in_order(jobs)]
        await working
        assert [job.id for job in found] == ids
        assert [job.result is not None for job in found] == [job_id != ids[5] for job_id in ids]
        assert found[5].failure == FAILURE
        assert not sdk._not_awaited
        [late] = await sdk.submit_many([wire.Score(model="demo", items=[wire.ScoreItem(prompt="a", completion="b")])])
        with pytest.raises(JobTimeout, match=late.id):
            [job async for job in sdk.in_order([ids[0], late], timeout_s=0.01)]
        with pytest.raises(ScorepoolError, match="no job"):
            [job async for job in sdk.in_order([ids[0], "0" * 32])]
        sdk.detach(late)


async def test_the_sdk_reads_a_result_of_the_result_store_by_itself(
    serving: Serving, worker: FakeWorker, tmp_path: Path
):
    async with serving(result_store=tmp_path.as_uri()) as http, sdk_of(http) as sdk:
        ids = await submit(http, 3)
        for job_id, outcome in zip(ids, (RESULT, STORED, RESULT), strict=True):
            worker.end(job_id, outcome)
        found = [job async for job in sdk.in_order(ids)]
    assert [job.id for job in found] == ids
    assert found[1].failure is not None  # there is no such object
    assert found[1].failure.message.startswith("the result of this job is missing from the result store")
