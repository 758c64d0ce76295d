"""The Redis client of workers and of RQ's tools: `--connection-class scorepool.worker.Redis`, or RQ_CONNECTION_CLASS.

redis-py's own, and it finds the master through Sentinel where the URL says so.
"""

from typing import Any

import redis
from redis._parsers.base import BaseParser
from redis.connection import parse_url
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.sentinel import Sentinel, SentinelConnectionPool

from scorepool.store import SentinelUrl

SENTINEL_TIMEOUT_S = 1.0  # then the next one is asked


class Refusing(RedisConnectionError):
    """Redis refuses all commands until its own state changes; the error is not about our command."""


for code in (
    "NOREPLICAS",  # a master that lost its replicas takes no writes (`min-replicas-to-write`)
    "MISCONF",  # nor does one that cannot write to its disk
    "BUSY",  # somebody's script does not end
    "MASTERDOWN",  # a replica that lost its master tells nothing old (`replica-serve-stale-data no`)
):
    BaseParser.EXCEPTION_CLASSES[code] = Refusing  # redis-py has no class of its own, or only a general one


class Redis(redis.Redis):
    @classmethod
    def from_url(cls, url: str, **kwargs: Any) -> redis.Redis:
        """Make a client from a URL. Raises SettingsError, or ValueError as redis-py does."""
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
