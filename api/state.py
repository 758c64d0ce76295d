"""What one API process holds: its connections to Redis, and the parts that routes use."""

from dataclasses import dataclass
from typing import Self

from redis.asyncio import Redis

from scorepool.api.admission import Admission
from scorepool.api.auth import Keyring
from scorepool.api.connection import REDIS_TIMEOUT_S, connect
from scorepool.api.metrics.prometheus import Metrics
from scorepool.api.repositories.batches import Batches
from scorepool.api.repositories.files import Files
from scorepool.api.repositories.jobs import Records
from scorepool.api.repositories.models import Models
from scorepool.api.repositories.queue import Queue
from scorepool.api.repositories.waiting import BLOCK_S, Waiting
from scorepool.api.repositories.webhook_deliveries import WebhookDeliveries
from scorepool.api.repositories.webhook_endpoints import WebhookEndpoints
from scorepool.store import Settings

MAX_CONNECTIONS = 64


@dataclass(frozen=True)
class State:
    settings: Settings
    keyring: Keyring
    redis: Redis
    stream_redis: Redis  # for the one blocking read
    queue: Queue
    records: Records
    models: Models
    door: Admission
    endpoints: WebhookEndpoints
    deliveries: WebhookDeliveries
    files: Files
    batches: Batches
    waiting: Waiting
    metrics: Metrics

    @classmethod
    def create(cls, settings: Settings) -> Self:
        """Connects to nothing yet. Raises SettingsError."""
        redis = connect(settings.redis_url, REDIS_TIMEOUT_S, MAX_CONNECTIONS)
        stream_redis = connect(settings.redis_url, BLOCK_S + REDIS_TIMEOUT_S, 1)
        keyring = Keyring.load(settings)
        metrics = Metrics()
        models = Models(redis)
        endpoints = WebhookEndpoints(redis, settings)
        return cls(
            settings=settings,
            keyring=keyring,
            redis=redis,
            stream_redis=stream_redis,
            queue=Queue(redis, settings, keyring),
            records=Records(redis),
            models=models,
            door=Admission(redis, models, endpoints),
            endpoints=endpoints,
            deliveries=WebhookDeliveries(redis, settings),
            files=Files(redis, settings),
            batches=Batches(redis),
            waiting=Waiting(stream_redis.client(), redis, on_ended=metrics.ended.inc),
            metrics=metrics,
        )

    async def close(self) -> None:
        await self.waiting.close()
        await self.stream_redis.aclose()
        await self.redis.aclose()
