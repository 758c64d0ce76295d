"""Connect an API process to Redis, or to the master that Sentinel names if the URL names sentinels."""

import logging
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from scorepool.store import MappedServer, SentinelUrl, ServerMap, SettingsError

logger = logging.getLogger(__name__)

REDIS_URL = "SCOREPOOL_REDIS_URL"
REDIS_TIMEOUT_S = 4.0  # for a command, and for a free connection
REDIS_CONNECT_TIMEOUT_S = 2.0
SENTINEL_TIMEOUT_S = 1.0  # then the next sentinel is asked


def connect(url: str, timeout_s: float, max_connections: int, setting: str = REDIS_URL) -> Redis:
    """Build a client with a connection pool. `setting` names the URL in errors. Raises SettingsError.

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
        raise SettingsError(f"{setting}: {error}") from None


async def check_logins(servers: ServerMap) -> None:
    """Refuse URLs that Redis rejects, and two that lead to one server. Raises SettingsError."""
    for server in servers.servers:
        await check_login(server.url, server.setting)
    if not servers.is_one:
        found = [(await _identity(server.url), server) for server in servers.servers]
        known: dict[tuple[str, int], MappedServer] = {}
        for identity, server in found:
            if identity is not None and known.setdefault(identity, server) is not server:
                other = known[identity].setting
                raise SettingsError(f"{server.setting}: it leads to the same Redis as {other}; expected the same URL")


async def _identity(url: str) -> tuple[str, int] | None:
    """Return what tells a server and its database from others; None if it does not answer."""
    redis = connect(url, REDIS_TIMEOUT_S, 1)
    try:
        info: Any = await redis.info("server")
        return str(info["run_id"]), int(redis.connection_pool.connection_kwargs.get("db") or 0)
    except (RedisError, OSError, KeyError):
        return None
    finally:
        await redis.aclose()


async def check_login(url: str, setting: str = REDIS_URL) -> None:
    """Refuse a URL that Redis rejects: a wrong user or password, a database that does not exist.

    A Redis that does not answer yet is no error: the API waits for it. Raises SettingsError, without the password.
    """
    redis = connect(url, REDIS_TIMEOUT_S, 1, setting)
    try:
        await redis.ping()
    except ResponseError as error:
        raise SettingsError(f"{setting}: Redis refuses the connection: {error}") from None
    except (RedisConnectionError, RedisTimeoutError, OSError) as error:
        # redis-py wraps the AuthenticationError of a unix socket in a ConnectionError
        if isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError):
            raise SettingsError(f"{setting}: Redis refuses the user or the password of the URL") from None
        logger.warning("no Redis answers at %s; until one does, requests get 503: %s", setting, error)
    except Exception as error:  # redis-py raises anything at replies that are none of Redis's
        raise SettingsError(f"{setting}: what answers at the URL is no Redis: {error!r}") from None
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
