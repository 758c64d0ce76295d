"""Every reply has an `x-request-id`, which the log lines of errors repeat."""

import logging

import pytest
from redis import Redis

from scorepool import store
from scorepool.api.repositories.models import Models
from tests.api.conftest import KEYS, Serving, score
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio


async def test_the_clients_own_id_is_answered_and_a_new_one_if_it_is_missing_or_not_sane(serving: Serving):
    async with serving() as http:
        own = await http.get("/healthz", headers={"x-request-id": "abc-1.2:3"})
        new = [
            await http.get("/healthz", headers=headers)
            for headers in ({}, {"x-request-id": "a b"}, {"x-request-id": "x" * 129}, {"x-request-id": ""})
        ]

    assert own.headers["x-request-id"] == "abc-1.2:3"
    ids = [reply.headers["x-request-id"] for reply in new]
    assert all(request_id.startswith("req_") and len(request_id) == 36 for request_id in ids)
    assert len(set(ids)) == 4


async def test_every_kind_of_reply_has_one(serving: Serving, worker: FakeWorker):
    async with serving(api_keys=KEYS, max_body_bytes=1000) as http:
        replies = [
            await http.get("/v1/jobs"),
            await http.get("/nothing"),
            await http.put("/v1/jobs"),
            await http.post("/v1/jobs", json=score(items=[{"prompt": "a" * 2000, "completion": "b"}])),
            await http.head("/healthz"),
        ]

    assert all(reply.headers["x-request-id"] for reply in replies)


async def test_the_log_names_the_request_that_failed(
    serving: Serving,
    worker: FakeWorker,
    redis: Redis,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    async def fail(_: Models) -> None:
        raise ZeroDivisionError

    async with serving() as http:
        with caplog.at_level(logging.ERROR, logger="scorepool.api"):
            redis.set(store.Keys.jobs_of("local"), "not a sorted set")
            damaged = await http.get("/v1/jobs", headers={"x-request-id": "damaged-1"})
            monkeypatch.setattr(Models, "live", fail)
            faulty = await http.get("/v1/models", headers={"x-request-id": "faulty-1"})

    assert (damaged.status_code, damaged.headers["x-request-id"]) == (503, "damaged-1")
    assert (faulty.status_code, faulty.headers["x-request-id"]) == (500, "faulty-1")
    assert "damaged-1 GET /v1/jobs: " in caplog.text
    assert "faulty-1 GET /v1/models: " in caplog.text
