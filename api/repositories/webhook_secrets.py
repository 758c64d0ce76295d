"""Show and rotate the secrets that sign the webhooks of jobs, one for each name of an API key."""

import secrets
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from scorepool import store, wire
from scorepool.api.http.errors import Conflict
from scorepool.api.repositories import decode
from scorepool.api.repositories.queue import check_writable
from scorepool.api.repositories.webhook_endpoints import ROTATION_S


class WebhookSecrets:
    """Read and rotate the secret of every owner. Raises SettingsError if the operator's secrets are invalid."""

    def __init__(self, redis: Redis, settings: store.Settings, copies: Sequence[Redis] = ()) -> None:
        """`copies` are the other servers of the deployment: their deliveries are signed with the same secrets."""
        self._redis = redis
        self._copies = copies
        self._operator_secrets = settings.webhook_secret
        if self._operator_secrets:
            store.decode_webhook_secrets(self._operator_secrets)

    async def read(self, owner: str) -> wire.JobWebhookSecret:
        """Return the secret in force; raise Conflict if the owner has none."""
        self._check(owner)
        now = await decode.now_s(self._redis)
        return self._show(owner, _decode(await self._redis.get(store.Keys.webhook_secret(owner))), now)

    async def rotate(self, owner: str) -> wire.JobWebhookSecret:
        """Replace the secret; the previous one stays valid for ROTATION_S. Raises Conflict if the owner has none."""
        self._check(owner)
        now = await decode.now_s(self._redis)
        key = store.Keys.webhook_secret(owner)
        for copy in self._copies:  # else the secret that the owner knows would not sign any more when it asks again
            await check_writable(copy)
        salt, after = secrets.token_hex(16), list[wire.SecretRotation]()

        async def write(pipeline: Pipeline) -> None:
            before = _decode(await pipeline.get(key))
            if before is not None and before.salt == salt:  # written before, by a transaction whose reply was lost
                after[:] = [before]
            else:
                previous_salt = before.salt if before else ""
                after[:] = [
                    wire.SecretRotation(salt=salt, previous_salt=previous_salt, previous_expires_at=now + ROTATION_S)
                ]
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.set(key, wire.encode_json(after[0]))

        await self._redis.transaction(write, key)
        for copy in self._copies:
            await copy.set(key, wire.encode_json(after[0]))
        return self._show(owner, after[0], now)

    async def complete_copies(self, owner: str) -> None:
        """Give servers that joined later, or missed a rotation, the owner's secrets. Raises RedisError."""
        key = store.Keys.webhook_secret(owner)
        own: Any = await self._redis.get(key)
        if (rotation := _decode(own)) is None:
            return
        for copy in self._copies:
            found = _decode(await copy.get(key))
            if found is None or found.previous_expires_at < rotation.previous_expires_at:
                await copy.set(key, own)

    def _show(self, owner: str, rotation: wire.SecretRotation | None, now: float) -> wire.JobWebhookSecret:
        return wire.JobWebhookSecret(
            secret=store.webhook_secrets(self._operator_secrets, owner, rotation, now)[0],
            previous_expires_at=(
                rotation.previous_expires_at if rotation and rotation.previous_expires_at > now else None
            ),
        )

    def _check(self, owner: str) -> None:
        if not self._operator_secrets:
            raise Conflict("this server has no webhooks; its operator enables them with SCOREPOOL_WEBHOOK_SECRET")
        if owner == store.LOCAL_OWNER:
            raise Conflict(
                "this server has no API keys: its operator's SCOREPOOL_WEBHOOK_SECRET signs webhooks of jobs"
            )


def _decode(value: object) -> wire.SecretRotation | None:
    return decode.message(value, wire.SecretRotation, "json")
