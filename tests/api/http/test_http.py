"""Behaviour that all routes share."""

import pytest

from scorepool.api.http import tasks
from tests.api.conftest import Serving, score
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio

REQUEST_ID = {"x-request-id": "req-1"}


async def test_head_is_get_without_the_body(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        id_ = (await http.post("/v1/jobs", json=score())).json()["id"]
        for path in (
            f"/v1/jobs/{id_}",
            "/v1/jobs",
            "/v1/models",
            "/v1/webhooks/endpoints",
            "/healthz",
            "/openapi.json",
        ):
            head, get = [await http.request(method, path, headers=REQUEST_ID) for method in ("HEAD", "GET")]
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers == get.headers
        assert (await http.head(f"/v1/jobs/{'0' * 32}")).status_code == 404
        assert (await http.head(f"/v1/jobs/{id_}/cancel")).status_code == 405


async def test_readyz_is_503_if_the_reader_of_ended_jobs_has_stopped(serving: Serving, worker: FakeWorker):
    """Every client would wait until its time is over."""
    async with serving() as http:
        while (await http.get("/readyz")).status_code != 200:
            pass
        waiting = http._transport.app.state.scorepool.waiting
        await tasks.cancel_and_wait([waiting._readers[0]._task])
        reply = await http.get("/readyz")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
    assert "stream of ended jobs" in reply.json()["error"]["message"]
