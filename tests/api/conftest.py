"""Run the application in this process on a real Redis, called over ASGI. FakeWorker stands for the worker."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest
from redis import Redis

import scorepool.api.connection
import scorepool.api.server
from scorepool.api.app import create_app
from scorepool.store import Settings
from tests.api.fake_worker import FakeWorker

SECRET = "whsec_" + "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
ALICE, BOB = "alice-key", "bob-key"
KEYS = ",".join(f"{name}:{hashlib.sha256(key.encode()).hexdigest()}" for name, key in [("alice", ALICE), ("bob", BOB)])

Serving = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def score(**changes: Any) -> dict[str, Any]:
    return {"type": "score", "model": "demo", "items": [{"prompt": "a", "completion": "b"}]} | changes


def generate(**changes: Any) -> dict[str, Any]:
    return {"type": "generate", "model": "demo", "prompt": "a"} | changes


async def trickle() -> AsyncIterator[bytes]:
    """Yield a body that never ends, one byte at a time."""
    while True:
        yield b" "
        await asyncio.sleep(0.02)


async def eventually(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - Redis changes, not this loop
            await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def worker(redis: Redis) -> FakeWorker:
    """Return a live worker that serves `demo`: 1000 token ids, 64 tokens of context."""
    worker = FakeWorker(redis)
    worker.register()
    return worker


@pytest.fixture
def serving(redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Serving:
    """Return `serving`: `async with serving(**settings) as http` runs an application and gives a client of it.

    Its timeouts for Redis are long, so that a machine that pauses for seconds fails no test.
    """
    for module, name in [
        (scorepool.api.connection, "REDIS_TIMEOUT_S"),
        (scorepool.api.connection, "REDIS_CONNECT_TIMEOUT_S"),
        (scorepool.api.server, "REDIS_TIMEOUT_S"),
    ]:
        monkeypatch.setattr(module, name, 60.0)

    @asynccontextmanager
    async def serving(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
        app = create_app(Settings(**{"redis_url": redis_url, "webhook_secret": SECRET} | settings))
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=30) as http:
                yield http

    return serving
