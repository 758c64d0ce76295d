"""Connections of an API process to Redis, to the master that Sentinel names where the URL says so."""

from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from scorepool.store import SentinelUrl, SettingsError

REDIS_TIMEOUT_S = 4.0  # of a command, and of waiting for a free connection
REDIS_CONNECT_TIMEOUT_S = 2.0
SENTINEL_TIMEOUT_S = 1.0  # then the next one is asked


def connect(url: str, timeout_s: float, max_connections: int) -> Redis:
    """One more try at once: a connection that idled through a restart of Redis fails once. Every write is a script that
    finds its own job when it is run again, so a retry repeats nothing. A Redis that does not answer is not asked twice:
    the client is told, and may. Raises SettingsError."""
    options = {
        "max_connections": max_connections,
        "timeout": REDIS_TIMEOUT_S,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": REDIS_CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
    }
    try:
        sentinel = SentinelUrl.parse(url)
        if sentinel is None:
            return Redis.from_pool(BlockingConnectionPool.from_url(url, **options))
        return Redis.from_pool(_pool(sentinel, options))
    except ValueError as error:
        raise SettingsError(f"SCOREPOOL_REDIS_URL: {error}") from None


class _SentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """Waits for a free connection, and closes those to the sentinels with its own."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:  # not only those to a master that is none any more
            for sentinel in self.sentinel_manager.sentinels:
                await sentinel.aclose()


def _pool(sentinel: SentinelUrl, options: dict[str, Any]) -> _SentinelPool:
    options = {**parse_url(sentinel.master), **options}
    del options["host"]
    options.pop("connection_class", None)
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    asked = {
        "socket_timeout": SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": SENTINEL_TIMEOUT_S,
        "ssl": sentinel.is_tls,
        **sentinel.credentials,
        **tls,
    }
    sentinels = Sentinel(sentinel.sentinels, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
    return _SentinelPool(sentinel.service, sentinels, ssl=sentinel.is_tls, **options)  # type: ignore[no-untyped-call]
