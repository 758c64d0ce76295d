"""Keep webhook endpoints of owners in Redis. A change of one is an optimistic transaction: WATCH, read, write."""

import base64
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from msgspec import UNSET
from msgspec.structs import replace
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError

from scorepool import store, wire
from scorepool.api.http.errors import BadRequest, Conflict, NotFound
from scorepool.api.repositories import decode
from scorepool.store.scripts import load

MAX_ENDPOINTS = 16  # of one owner: each job that ends makes a delivery to every one of them
_ID = re.compile(r"[0-9a-f]{16}")
ROTATION_S = 86_400  # how long deliveries are also signed with the previous secret


class WebhookEndpoints:
    """Register, read, change and delete the endpoints of every owner."""

    def __init__(
        self, redis: Redis, settings: store.Settings, max_bytes: int = 0, copies: Sequence[Redis] = ()
    ) -> None:
        """Load the scripts. `max_bytes` is Quota.max_bytes.

        `copies` are the other servers of the deployment, whose jobs' ends make deliveries too. Each has all endpoints.
        """
        self._redis = redis
        self._copies = copies
        self._settings = settings
        self._max_bytes = max_bytes
        self._register = redis.register_script(load("register_endpoint.lua"))
        self._delete = redis.register_script(load("delete_endpoint.lua"))

    def check_url(self, url: str, field: str) -> None:
        """Check a webhook URL; raise BadRequest if it is not allowed."""
        if not self._settings.webhook_secret:
            raise BadRequest(
                f"{field}: this server has no webhooks; its operator enables them with SCOREPOOL_WEBHOOK_SECRET",
                field,
            )
        try:
            store.WebhookUrl.parse(url, self._settings.webhook_allow_private)
        except ValueError as error:
            raise BadRequest(f"{field}: {error}, found {wire.quote(url)}", field) from None

    async def register(self, owner: str, registration: wire.EndpointRegistration) -> wire.WebhookSecret:
        """Store a new endpoint with a new secret; raise BadRequest or Conflict."""
        self.check_url(registration.url, "url")
        endpoint = wire.WebhookEndpoint(
            id=uuid4().hex[:16],
            url=registration.url,
            events=registration.events,
            description=registration.description,
            created_at=await decode.now_s(self._redis),
        )
        secret = new_secret()
        subscriber = wire.Subscriber(endpoint=endpoint, secrets=[wire.SigningSecret(secret=secret)])
        try:
            for redis in (self._redis, *self._copies):
                await self._register_on(redis, owner, subscriber)
        except BaseException:  # nobody learns its secret
            for redis in (self._redis, *self._copies):
                with suppress(RedisError):
                    await self._delete(args=[owner, endpoint.id], client=redis)
            raise
        return wire.WebhookSecret(endpoint=endpoint, secret=secret)

    async def _register_on(self, redis: Redis, owner: str, subscriber: wire.Subscriber) -> None:
        """Register an endpoint on one server; raise Conflict if its owner has too many, or no room for deliveries."""
        body, max_bytes = wire.encode_json(subscriber), self._max_bytes
        args: list[str | bytes | int] = [owner, subscriber.endpoint.id, body, MAX_ENDPOINTS, max_bytes]
        answer: Any = await self._register(args=args, client=redis)
        if answer[0] == b"too_many":
            raise Conflict(f"you have {answer[1]} endpoints, which is the limit; delete one first")
        if answer != [b"registered"]:
            raise Conflict(
                f"your jobs would make deliveries of about {answer[3]} bytes to this endpoint, and there is no room "
                "for them (SCOREPOOL_MAX_BYTES_PER_KEY); register it when jobs have ended and expired, or delete some"
            )

    async def read_all(self, owner: str) -> list[wire.WebhookEndpoint]:
        """Return the owner's endpoints, oldest first."""
        found: dict[str, wire.WebhookEndpoint] = {}
        for redis in (self._redis, *self._copies):
            values: Any = await redis.hvals(store.Keys.endpoints_of(owner))
            for subscriber in (decode.message(value, wire.Subscriber, "json") for value in values):
                if subscriber and found.setdefault(subscriber.endpoint.id, subscriber.endpoint).disabled_at is None:
                    found[subscriber.endpoint.id] = subscriber.endpoint
        return sorted(found.values(), key=lambda endpoint: endpoint.created_at)

    async def read(self, owner: str, endpoint_id: str) -> wire.WebhookEndpoint:
        """Return one endpoint; raise NotFound."""
        _check_id(endpoint_id)
        found: Any = await self._redis.hget(store.Keys.endpoints_of(owner), endpoint_id)
        return _as_disabled(_decode(found, endpoint_id), await self._read_copies(owner, endpoint_id)).endpoint

    async def complete_copies(self, owner: str) -> None:
        """Give servers that joined the deployment later the owner's endpoints. Raises RedisError."""
        key = store.Keys.endpoints_of(owner)
        values: Any = await self._redis.hgetall(key)
        for copy in self._copies:
            for endpoint_id, value in values.items():
                if await copy.hsetnx(key, endpoint_id, value) and not await self._redis.hexists(key, endpoint_id):
                    await copy.hdel(key, endpoint_id)  # its owner has deleted it meanwhile

    async def change(self, owner: str, endpoint_id: str, change: wire.EndpointChange) -> wire.WebhookEndpoint:
        """Change the given fields of an endpoint; raise BadRequest or NotFound."""
        if change.url is not UNSET:
            self.check_url(change.url, "url")
        now = await decode.now_s(self._redis)

        def changed(before: wire.Subscriber) -> wire.Subscriber:
            given = {name: getattr(change, name) for name in ("url", "events", "description")}
            endpoint = replace(before.endpoint, **{name: value for name, value in given.items() if value is not UNSET})
            after = replace(before, endpoint=endpoint)
            if change.disabled is False:
                return after.as_enabled()
            if change.disabled is True and endpoint.disabled_at is None:
                return after.as_disabled(now, "its owner disabled it")
            return after

        return (await self._update(owner, endpoint_id, changed)).endpoint

    async def rotate(self, owner: str, endpoint_id: str) -> wire.WebhookSecret:
        """Replace the secret; the previous one stays valid for ROTATION_S. Raises NotFound."""
        secret, until = new_secret(), await decode.now_s(self._redis) + ROTATION_S

        def rotated(before: wire.Subscriber) -> wire.Subscriber:
            if before.secrets[0].secret == secret:  # written before, by a transaction whose reply was lost
                return before
            previous = [replace(old, expires_at=until) for old in before.secrets[:1]]
            return replace(before, secrets=[wire.SigningSecret(secret=secret), *previous])

        after = await self._update(owner, endpoint_id, rotated)
        return wire.WebhookSecret(endpoint=after.endpoint, secret=secret, previous_expires_at=until)

    async def delete(self, owner: str, endpoint_id: str) -> None:
        """Delete an endpoint, so that its pending deliveries fail; raise NotFound."""
        _check_id(endpoint_id)
        await self._read_copies(owner, endpoint_id)  # it is deleted on all servers, or, if one does not answer, on none
        servers = (self._redis, *self._copies)
        deleted = [await self._delete(args=[owner, endpoint_id], client=redis) for redis in servers]
        if not any(deleted):
            raise _endpoint_not_found(endpoint_id)

    async def _update(
        self,
        owner: str,
        endpoint_id: str,
        update: Callable[[wire.Subscriber], wire.Subscriber],
    ) -> wire.Subscriber:
        _check_id(endpoint_id)
        key = store.Keys.endpoints_of(owner)
        after: list[wire.Subscriber] = []
        copies = await self._read_copies(owner, endpoint_id)

        async def write(pipeline: Pipeline) -> None:
            before = _as_disabled(_decode(await pipeline.hget(key, endpoint_id), endpoint_id), copies)
            after[:] = [update(before)]
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.hset(key, endpoint_id, wire.encode_json(after[0]))

        await self._redis.transaction(write, key)
        for copy in self._copies:
            await copy.hset(key, endpoint_id, wire.encode_json(after[0]))
        if self._copies and not await self._redis.hexists(key, endpoint_id):  # its owner has deleted it meanwhile
            for copy in self._copies:
                await self._delete(args=[owner, endpoint_id], client=copy)
            raise _endpoint_not_found(endpoint_id)
        return after[0]

    async def _read_copies(self, owner: str, endpoint_id: str) -> list[wire.Subscriber]:
        found = [await copy.hget(store.Keys.endpoints_of(owner), endpoint_id) for copy in self._copies]
        copies = (decode.message(value, wire.Subscriber, "json") for value in found)
        return [subscriber for subscriber in copies if subscriber]


def new_secret() -> str:
    """Return a random secret of 32 bytes in the form of Standard Webhooks."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


def _decode(value: bytes | str | None, endpoint_id: str) -> wire.Subscriber:
    subscriber = decode.message(value, wire.Subscriber, "json")
    if subscriber is None:
        raise _endpoint_not_found(endpoint_id)
    return subscriber


def _as_disabled(subscriber: wire.Subscriber, copies: Sequence[wire.Subscriber]) -> wire.Subscriber:
    """Return it disabled if the deliveries of any server have disabled it."""
    disabled = next((each for each in (subscriber, *copies) if each.endpoint.disabled_at is not None), None)
    return replace(subscriber, endpoint=disabled.endpoint) if disabled else subscriber


def _check_id(endpoint_id: str) -> None:
    """Check the form of an id before it becomes a field in Redis. Raise NotFound."""
    if not _ID.fullmatch(endpoint_id):
        raise _endpoint_not_found(endpoint_id)


def _endpoint_not_found(endpoint_id: str) -> NotFound:
    return NotFound(f"no webhook endpoint {wire.quote(endpoint_id)}", "id")
