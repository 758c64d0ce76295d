"""Pages of large results: how large they get, who renders them, and readers that do not read."""

import asyncio
import threading
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from starlette.types import Message

from scorepool import wire
from scorepool.api.http import large_replies
from scorepool.api.page import jobs as jobs_page
from scorepool.api.page.tokens import MAX_ALTERNATIVES, MAX_SHOWN, show_sequence
from tests.api.conftest import Serving, score
from tests.api.fake_worker import RESULT, FakeWorker

pytestmark = pytest.mark.anyio


def result_of(num_tokens: int, num_top: int) -> wire.Result:
    sequence = wire.SequenceResult(
        token_ids=[0] * num_tokens,
        token_bytes=[b"tok"] * num_tokens,
        text="tok" * num_tokens,
        logprobs=wire.Floats([-1.0] * num_tokens),
        top_ids=[list(range(num_top))] * num_tokens,
        top_bytes=[[b"top%03d" % number for number in range(num_top)]] * num_tokens,
        top_logprobs=[wire.Floats([-1.0] * num_top)] * num_tokens,
    )
    return replace(RESULT, sequences=[sequence])


async def path_of(http: httpx.AsyncClient, worker: FakeWorker, result: wire.Result) -> str:
    job_id = (await http.post("/v1/jobs", json=score())).json()["id"]
    worker.end(job_id, result)
    return f"/jobs/{job_id}"


async def test_a_page_of_the_largest_results_stays_small(serving: Serving, worker: FakeWorker):
    """Without the bound on alternatives it has more than 13 MiB."""
    async with serving() as http:
        page = await http.get(await path_of(http, worker, result_of(MAX_SHOWN, 128)))
    assert page.status_code == 200
    assert len(page.content) < 4 * 2**20
    assert f"top{MAX_ALTERNATIVES - 1:03d}" in page.text
    assert f"top{MAX_ALTERNATIVES:03d}" not in page.text
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert not large_replies._held.by_owner


@pytest.mark.parametrize("path", ["", "/compare?with="])
async def test_a_reader_that_does_not_read_is_counted_and_cut_off(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, path: str
):
    monkeypatch.setattr(large_replies, "READ_GRACE_S", 0.05)
    held: list[int] = []
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            held.append(sum(large_replies._held.by_owner.values()))
            await asyncio.Event().wait()

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async with serving() as http:
        job = await path_of(http, worker, result_of(MAX_SHOWN, 5))
        target, _, query = (job + path + (job.removeprefix("/jobs/") if path else "")).partition("?")
        size = len((await http.get(f"{target}?{query}")).content)
        app = http._transport.app  # type: ignore[attr-defined]
        scope = {
            "type": "http",
            "method": "GET",
            "path": target,
            "raw_path": target.encode(),
            "query_string": query.encode(),
            "headers": [(b"host", b"127.0.0.1:8000")],
            "server": ("127.0.0.1", 8000),
            "client": ("127.0.0.1", 1),
            "scheme": "http",
            "http_version": "1.1",
            "root_path": "",
            "asgi": {"version": "3.0"},
        }
        async with asyncio.timeout(30):
            await app(scope, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert len(sent[1]["body"]) == large_replies.PIECE_BYTES < size
    assert held == [size]
    assert not large_replies._held.by_owner


async def test_a_long_sequence_is_rendered_in_a_thread(
    serving: Serving, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    """Its result is small as it is stored; its page takes 0.1 s."""
    threads: list[str] = []

    def in_thread(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return show_sequence(*arguments)

    monkeypatch.setattr(jobs_page, "show_sequence", in_thread)
    async with serving() as http:
        for num_tokens in (2, 1000):
            await http.get(await path_of(http, worker, result_of(num_tokens, 0)))
    assert threads[0] == threading.current_thread().name
    assert threads[1].startswith("reply")
