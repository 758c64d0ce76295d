"""What one API process holds: its connections to Redis, and the parts that routes use."""

from dataclasses import dataclass
from typing import Self

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from api.auth import Keyring
from api.batches.store import Batches
from api.deliveries import Deliveries
from api.door import Door
from api.endpoints import Endpoints
from api.files import Files
from api.metrics import Metrics
from api.models import Models
from api.queue import Queue
from api.records import Records
from api.waiting import BLOCK_S, Waiting
from wire import Settings, SettingsError

REDIS_TIMEOUT_S = 4.0  # of a command, and of waiting for a free connection
REDIS_CONNECT_TIMEOUT_S = 2.0
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
    door: Door
    endpoints: Endpoints
    deliveries: Deliveries
    files: Files
    batches: Batches
    waiting: Waiting
    metrics: Metrics

    @classmethod
    def create(cls, settings: Settings) -> Self:
        """Connects to nothing yet. Raises SettingsError."""
        redis = _connect(settings.redis_url, REDIS_TIMEOUT_S, MAX_CONNECTIONS)
        stream_redis = _connect(settings.redis_url, BLOCK_S + REDIS_TIMEOUT_S, 1)
        metrics = Metrics()
        models = Models(redis)
        endpoints = Endpoints(redis, settings)
        return cls(
            settings=settings,
            keyring=Keyring.load(settings),
            redis=redis,
            stream_redis=stream_redis,
            queue=Queue(redis, settings),
            records=Records(redis),
            models=models,
            door=Door(models, endpoints),
            endpoints=endpoints,
            deliveries=Deliveries(redis, settings),
            files=Files(redis, settings),
            batches=Batches(redis),
            waiting=Waiting(stream_redis, redis, on_ended=metrics.ended.inc),
            metrics=metrics,
        )

    async def close(self) -> None:
        await self.waiting.close()
        await self.stream_redis.aclose()
        await self.redis.aclose()


def _connect(url: str, timeout_s: float, max_connections: int) -> Redis:
    """One more try at once: a connection that idled through a restart of Redis fails once. Every write is a script that
    finds its own job when it is run again, so a retry repeats nothing. A Redis that does not answer is not asked twice:
    the client is told, and may."""
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=REDIS_TIMEOUT_S,
            socket_timeout=timeout_s,
            socket_connect_timeout=REDIS_CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
        )
    except ValueError as error:
        raise SettingsError(f"SCOREPOOL_REDIS_URL: {error}") from None
    return Redis.from_pool(pool)
