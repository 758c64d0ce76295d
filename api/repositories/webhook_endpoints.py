"""Owners' webhook endpoints in Redis. Every change is a read and a write that nobody came between."""

import base64
import secrets
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from msgspec import UNSET
from msgspec.structs import replace
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from scorepool import store, wire
from scorepool.api.http.errors import BadRequest, Conflict, NotFound
from scorepool.api.repositories import decode as stored

MAX_ENDPOINTS = 16  # of one owner: each job that ends is told to all of them
ROTATION_S = 86_400  # for which deliveries are signed with the old secret, too


class Endpoints:
    def __init__(self, redis: Redis, settings: store.Settings) -> None:
        self._redis = redis
        self._settings = settings

    def check_url(self, url: str, field: str) -> None:
        """The rules for every webhook URL. Raises BadRequest."""
        if not self._settings.webhook_secret:
            raise BadRequest(
                f"{field}: this server signs no webhooks; its operator sets SCOREPOOL_WEBHOOK_SECRET to allow them",
                field,
            )
        try:
            store.WebhookUrl.parse(url, self._settings.webhook_allow_private)
        except ValueError as error:
            raise BadRequest(f"{field}: {error}, found {url[:80]!r}", field) from None

    async def register(self, owner: str, registration: wire.EndpointRegistration) -> wire.WebhookSecret:
        """Raises BadRequest, Conflict."""
        self.check_url(registration.url, "url")
        endpoint = wire.WebhookEndpoint(
            id=uuid4().hex[:16],
            url=registration.url,
            events=registration.events,
            description=registration.description,
            created_at=time.time(),
        )
        secret = new_secret()
        subscriber = wire.Subscriber(endpoint=endpoint, secrets=[wire.SigningSecret(secret=secret)])
        key = store.Keys.endpoints(owner)

        async def write(pipeline: Pipeline) -> None:
            count: Any = await pipeline.hlen(key)
            if count >= MAX_ENDPOINTS:
                raise Conflict(f"you have {count} endpoints, the most there may be; delete one first")
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.hset(key, endpoint.id, wire.encode_json(subscriber))

        await self._redis.transaction(write, key)
        return wire.WebhookSecret(endpoint=endpoint, secret=secret)

    async def all(self, owner: str) -> list[wire.WebhookEndpoint]:
        """The oldest first."""
        texts: Any = await self._redis.hvals(store.Keys.endpoints(owner))
        subscribers = [stored.message(text, wire.Subscriber, "json") for text in texts]
        endpoints = (subscriber.endpoint for subscriber in subscribers if subscriber)
        return sorted(endpoints, key=lambda endpoint: endpoint.created_at)

    async def read(self, owner: str, id: str) -> wire.WebhookEndpoint:  # noqa: A002
        """Raises NotFound."""
        return _found(await self._redis.hget(store.Keys.endpoints(owner), id), id).endpoint

    async def change(self, owner: str, id: str, change: wire.EndpointChange) -> wire.WebhookEndpoint:  # noqa: A002
        """Raises BadRequest, NotFound."""
        if change.url is not UNSET:
            self.check_url(change.url, "url")

        def changed(before: wire.Subscriber) -> wire.Subscriber:
            given = {name: getattr(change, name) for name in ("url", "events", "description")}
            endpoint = replace(before.endpoint, **{name: value for name, value in given.items() if value is not UNSET})
            after = replace(before, endpoint=endpoint)
            if change.disabled is False:
                return after.as_enabled()
            if change.disabled is True and endpoint.disabled_at is None:
                return after.as_disabled(time.time(), "its owner disabled it")
            return after

        return (await self._update(owner, id, changed)).endpoint

    async def rotate(self, owner: str, id: str) -> wire.WebhookSecret:  # noqa: A002
        """A new secret; the one before signs for ROTATION_S more. Raises NotFound."""
        secret, until = new_secret(), time.time() + ROTATION_S

        def rotated(before: wire.Subscriber) -> wire.Subscriber:
            previous = [replace(one, expires_at=until) for one in before.secrets[:1]]
            return replace(before, secrets=[wire.SigningSecret(secret=secret), *previous])

        after = await self._update(owner, id, rotated)
        return wire.WebhookSecret(endpoint=after.endpoint, secret=secret, previous_expires_at=until)

    async def delete(self, owner: str, id: str) -> None:  # noqa: A002
        """Deliveries to it that are still to come will fail. Raises NotFound."""
        deleted: Any = await self._redis.hdel(store.Keys.endpoints(owner), id)
        if not deleted:
            raise _absent(id)

    async def _update(
        self,
        owner: str,
        id: str,  # noqa: A002
        update: Callable[[wire.Subscriber], wire.Subscriber],
    ) -> wire.Subscriber:
        key = store.Keys.endpoints(owner)
        after: list[wire.Subscriber] = []

        async def write(pipeline: Pipeline) -> None:
            after[:] = [update(_found(await pipeline.hget(key, id), id))]
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.hset(key, id, wire.encode_json(after[0]))

        await self._redis.transaction(write, key)
        return after[0]


def new_secret() -> str:
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


def _found(text: bytes | str | None, id: str) -> wire.Subscriber:  # noqa: A002
    subscriber = stored.message(text, wire.Subscriber, "json")
    if subscriber is None:
        raise _absent(id)
    return subscriber


def _absent(id: str) -> NotFound:  # noqa: A002
    return NotFound(f"no webhook endpoint {id[:64]!r}", "id")
