"""Build what an API process holds of one Redis server: its connections, and the repositories of what is on it."""

from dataclasses import dataclass
from typing import Self

from redis.asyncio import Redis

from scorepool.api.auth import Keyring
from scorepool.api.connection import REDIS_TIMEOUT_S, connect
from scorepool.api.repositories.event_reader import BLOCK_S, EventReader
from scorepool.api.repositories.jobs import Jobs
from scorepool.api.repositories.models import Models
from scorepool.api.repositories.queue import Queue
from scorepool.api.repositories.stored_results import StoredResults
from scorepool.api.repositories.webhook_deliveries import WebhookDeliveries
from scorepool.store import MappedServer, Settings
from scorepool.store.result_store import ResultStore

MAX_CONNECTIONS = 64


@dataclass(frozen=True)
class Server:
    """Hold the parts of one server."""

    redis: Redis
    stream_redis: Redis  # for the one blocking read
    reader: EventReader
    models: Models
    jobs: Jobs
    stored_results: StoredResults
    queue: Queue
    deliveries: WebhookDeliveries

    @classmethod
    def create(
        cls, server: MappedServer, settings: Settings, keyring: Keyring, result_store: ResultStore | None
    ) -> Self:
        """Build the parts without connecting. Raises SettingsError."""
        redis = connect(server.url, REDIS_TIMEOUT_S, MAX_CONNECTIONS, server.setting)
        stream_redis = connect(server.url, BLOCK_S + REDIS_TIMEOUT_S, 1, server.setting)
        stored_results = StoredResults(redis, result_store)
        return cls(
            redis=redis,
            stream_redis=stream_redis,
            reader=EventReader(stream_redis.client(), redis),
            models=Models(redis),
            jobs=Jobs(redis, stored_results),
            stored_results=stored_results,
            queue=Queue(redis, settings, keyring.weight, keyring.has_several_owners),
            deliveries=WebhookDeliveries(redis, settings),
        )
