"""The Redis client of workers and of RQ's tools: `--connection-class worker.Redis`, or RQ_CONNECTION_CLASS.

redis-py's own, and it finds the master through Sentinel where the URL says so.
"""

from typing import Any

import redis
from redis._parsers.base import BaseParser
from redis.connection import parse_url
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.sentinel import Sentinel, SentinelConnectionPool

from wire import SentinelUrl

SENTINEL_TIMEOUT_S = 1.0  # then the next one is asked


class NoReplicasError(RedisConnectionError):
    """A master that lost its replicas takes no writes (`min-replicas-to-write`)."""


BaseParser.EXCEPTION_CLASSES["NOREPLICAS"] = NoReplicasError  # redis-py knows no class of it


class Redis(redis.Redis):
    @classmethod
    def from_url(cls, url: str, **kwargs: Any) -> redis.Redis:
        """Raises SettingsError, or ValueError as redis-py does."""
        sentinel = SentinelUrl.parse(url)
        if sentinel is None:
            return super().from_url(url, **kwargs)
        options: dict[str, Any] = parse_url(sentinel.master) | kwargs
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
        sentinels = Sentinel(sentinel.sentinels, sentinel_kwargs=asked)
        return cls.from_pool(SentinelConnectionPool(sentinel.service, sentinels, ssl=sentinel.is_tls, **options))
