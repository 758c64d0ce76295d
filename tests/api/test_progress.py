"""Clients see how far a job is, through other clients' tokens, takeovers and restarts of the API."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from scorepool import store, wire
from scorepool.api.repositories import progress as progress_board
from tests.api.conftest import Serving, eventually, score
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio


def progress(job_id: str, num_items_done: int, run: int = 1) -> wire.Progress:
    return wire.Progress(
        id=job_id,
        run=run,
        num_items=100,
        num_items_done=num_items_done,
        num_tokens=1000,
        num_tokens_done=num_items_done * 10,
    )


def write(worker: FakeWorker, *reported: wire.Progress) -> None:
    entry: Any = {"step": wire.encode(wire.TokenDeltas()), "progress": wire.encode(list(reported))}
    worker.redis.xadd(store.TOKENS, entry)


async def start(http: httpx.AsyncClient, worker: FakeWorker) -> str:
    while (await http.get("/readyz")).status_code != 200:
        pass
    job_id = (await http.post("/v1/jobs", json=score())).json()["id"]
    worker.start(job_id)
    return str(job_id)


def board(http: httpx.AsyncClient) -> Any:
    return http._transport.app.state.scorepool.waiting.progress  # type: ignore[attr-defined]


def events(reply: httpx.Response) -> list[tuple[str, int | str]]:
    """Return the name of each event, with the items that are done or the job's status."""
    found = []
    for block in reply.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if "event" in lines:
            data = json.loads(lines["data"])
            found.append((lines["event"], data.get("num_items_done", data.get("status"))))
            assert ("id" in lines) == (lines["event"] == "end")
    return found


async def test_a_client_gets_the_latest_progress_and_then_the_next(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        job_id = await start(http, worker)
        write(worker, progress(job_id, 5), progress("another", 50))
        write(worker, progress(job_id, 7))
        await eventually(lambda: board(http).latest(job_id) == progress(job_id, 7))
        reply = asyncio.create_task(http.get(f"/v1/jobs/{job_id}/events"))
        await eventually(lambda: len(http._transport.app.state.scorepool.waiting))  # type: ignore[attr-defined]
        write(worker, progress("another", 60))
        write(worker, progress(job_id, 9))
        write(worker, progress(job_id, 8))  # late
        write(worker, progress(job_id, 2, run=2))  # another worker took the job over
        write(worker, progress(job_id, 11))  # the first worker has woken
        write(worker, progress(job_id, 4, run=2))
        await eventually(lambda: board(http).latest(job_id) == progress(job_id, 4, run=2))
        worker.end(job_id)

        numbers = [("progress", number) for number in (7, 9, 2, 4)]
        assert events(await reply) == [*numbers, ("end", "finished")]
        await eventually(lambda: board(http).latest(job_id) is None)
        assert events(await http.get(f"/v1/jobs/{job_id}/events")) == [("end", "finished")]


async def test_the_page_of_a_job_shows_its_progress(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        job_id = await start(http, worker)
        assert "items done" not in (await http.get(f"/jobs/{job_id}")).text
        write(worker, progress(job_id, 37))
        await eventually(lambda: board(http).latest(job_id))

        assert "<dt>items done</dt><dd>37 of 100</dd>" in (await http.get(f"/jobs/{job_id}")).text
        worker.end(job_id)
        await eventually(lambda: board(http).latest(job_id) is None)
        assert "items done" not in (await http.get(f"/jobs/{job_id}")).text


async def test_what_is_no_progress_is_ignored_and_what_is_kept_is_bounded(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(progress_board, "MAX_JOBS", 3)
    async with serving() as http:
        job_id = await start(http, worker)
        step = wire.encode(wire.TokenDeltas())
        bodies = [b"", b"\xff", wire.encode([{"id": 5}]), wire.encode([progress(job_id, 5)])[:-1]]
        for body in bodies:
            worker.redis.xadd(store.TOKENS, {"step": step, "progress": body})
        for number in range(5):
            write(worker, progress(f"job {number}", number))
        await eventually(lambda: board(http).latest("job 4"))

        assert [board(http).latest(f"job {number}") is None for number in range(5)] == [True, True, False, False, False]
        assert caplog.text.count("cannot be decoded") == len(bodies)
