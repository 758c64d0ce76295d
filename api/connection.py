"""Connect an API process to Redis, or to the master that Sentinel names if the URL names sentinels."""

import logging
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from scorepool.store import SentinelUrl, SettingsError

logger = logging.getLogger(__name__)

REDIS_TIMEOUT_S = 4.0  # for a command, and for a free connection
REDIS_CONNECT_TIMEOUT_S = 2.0
SENTINEL_TIMEOUT_S = 1.0  # then the next sentinel is asked


def connect(url: str, timeout_s: float, max_connections: int) -> Redis:
    """Build a client with a connection pool. Raises SettingsError.

    A command is retried once after a connection error, because an idle connection fails once after Redis restarts. A
    retry repeats nothing: every write is a script that finds its own job when it runs again. A command that times out
    is not retried: the API answers 503, and the client may retry.
    """
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
    except SettingsError as error:
        raise SettingsError(f"SCOREPOOL_REDIS_URL: {error}") from None


async def check_login(url: str) -> None:
    """Refuse a URL that Redis rejects: a wrong user or password, a database that does not exist.

    A Redis that does not answer yet is no error: the API waits for it. Raises SettingsError, without the password.
    """
    redis = connect(url, REDIS_TIMEOUT_S, 1)
    try:
        await redis.ping()
    except ResponseError as error:
        raise SettingsError(f"SCOREPOOL_REDIS_URL: Redis refuses the connection: {error}") from None
    except (RedisConnectionError, RedisTimeoutError, OSError) as error:
        # redis-py wraps the AuthenticationError of a unix socket in a ConnectionError
        if isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError):
            raise SettingsError("SCOREPOOL_REDIS_URL: Redis refuses the user or the password of the URL") from None
        logger.warning("no Redis answers at SCOREPOOL_REDIS_URL; until one does, requests get 503: %s", error)
    except Exception as error:  # redis-py raises anything at replies that are none of Redis's
        raise SettingsError(f"SCOREPOOL_REDIS_URL: what answers at the URL is no Redis: {error!r}") from None
    finally:
        await redis.aclose()


class _SentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """Wait for a free connection, and close the connections to the sentinels together with the pool's own."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:  # not only the connections to a former master
            for sentinel in self.sentinel_manager.sentinels:
                await sentinel.aclose()


def _pool(sentinel: SentinelUrl, options: dict[str, Any]) -> _SentinelPool:
    options = {**parse_url(sentinel.master), **options}
    del options["host"]
    options.pop("connection_class", None)
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    sentinel_options = {
        "socket_timeout": SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": SENTINEL_TIMEOUT_S,
        "ssl": sentinel.is_tls,
        **sentinel.credentials,
        **tls,
    }
    sentinels = Sentinel(sentinel.sentinels, sentinel_kwargs=sentinel_options)  # type: ignore[no-untyped-call]
    return _SentinelPool(sentinel.service, sentinels, ssl=sentinel.is_tls, **options)  # type: ignore[no-untyped-call]
