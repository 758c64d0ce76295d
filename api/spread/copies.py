"""Give servers that joined the deployment later what every server has: webhook endpoints and secrets."""

import asyncio
import logging
from collections.abc import Sequence

from redis.exceptions import RedisError

from scorepool.api.http import tasks
from scorepool.api.repositories.webhook_endpoints import WebhookEndpoints
from scorepool.api.repositories.webhook_secrets import WebhookSecrets
from scorepool.store.outage import Outage

logger = logging.getLogger(__name__)
RETRY_S = 2.0  # while a server does not answer
EVERY_S = 60.0  # a server may have lost its data


class Copies:
    """A task of each API process. It writes only what is absent."""

    def __init__(self, owners: Sequence[str], endpoints: WebhookEndpoints, secrets: WebhookSecrets) -> None:
        self._owners = owners
        self._endpoints = endpoints
        self._secrets = secrets
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run(), name="webhook-copies")

    async def close(self) -> None:
        """End the task."""
        if self._task is not None:
            await tasks.cancel_and_wait([self._task])

    async def complete(self) -> None:
        """Write what is absent. Raises RedisError."""
        for owner in self._owners:
            await self._endpoints.complete_copies(owner)
            await self._secrets.complete_copies(owner)

    async def _run(self) -> None:
        outage = Outage(logger)
        while True:
            try:
                await self.complete()
                outage.ended("all servers have the webhook endpoints again")
                await asyncio.sleep(EVERY_S)
            except (RedisError, OSError) as error:
                outage.failed("not all servers have the webhook endpoints: %s", error)
                await asyncio.sleep(RETRY_S)
