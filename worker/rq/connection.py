"""The Redis client of workers and of RQ's tools: `--connection-class scorepool.worker.Redis`, or RQ_CONNECTION_CLASS.

The class extends redis-py's own by URLs that name the master through Sentinel, and by timeouts that count from the last
progress (progress_connection.py).
"""

import logging
import sys
from typing import Any

import redis
from redis._parsers.base import BaseParser
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.exceptions import AuthenticationError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from scorepool.store import SentinelUrl, SettingsError, has_password
from scorepool.worker.redis_link.progress_connection import (
    Connection,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
    SSLConnection,
    UnixDomainSocketConnection,
)

log = logging.getLogger(__name__)
SENTINEL_TIMEOUT_S = 1.0  # after it, the next sentinel is asked
CONNECTION_CLASSES: dict[type, type] = {
    redis.Connection: Connection,
    redis.SSLConnection: SSLConnection,
    redis.UnixDomainSocketConnection: UnixDomainSocketConnection,
}
LOGIN_OPTIONS: dict[str, Any] = {"socket_timeout": 2.0, "socket_connect_timeout": 2.0, "retry": Retry(NoBackoff(), 0)}


class Refusing(RedisConnectionError):
    """Redis refuses all commands until its own state changes; the error is not about our command."""


for code in (
    "NOREPLICAS",  # a master that lost its replicas takes no writes (`min-replicas-to-write`)
    "MISCONF",  # a server that cannot write to its disk takes no writes
    "BUSY",  # a script runs for too long
    "MASTERDOWN",  # a replica that lost its master serves no stale data (`replica-serve-stale-data no`)
):
    BaseParser.EXCEPTION_CLASSES[code] = Refusing  # redis-py has no class for it, or only a general one


class Redis(redis.Redis):
    @classmethod
    def from_url(cls, url: str, **kwargs: Any) -> redis.Redis:
        """Make a client from a URL. End the process with one sentence, without any part of the URL, if it is wrong.

        RQ calls this before anything else. It would show a traceback of every other exception.
        """
        try:
            _check_login(cls._connect(url, **kwargs | LOGIN_OPTIONS))
            if has_password(url) and any(url in argument for argument in sys.argv):
                log.warning(
                    "the password of Redis is in the command line, which all users of this machine can read: "
                    "set RQ_REDIS_URL instead of `--url`"
                )
            return cls._connect(url, **kwargs)
        except SettingsError as error:
            raise SystemExit(f"scorepool: SCOREPOOL_REDIS_URL (or RQ_REDIS_URL, or `rq --url`): {error}") from None

    @classmethod
    def _connect(cls, url: str, **kwargs: Any) -> redis.Redis:
        """Make a client of the server, or of the master that Sentinel names. Raises SettingsError."""
        sentinel = SentinelUrl.parse(url)
        if sentinel is None:
            connection_class = CONNECTION_CLASSES[parse_url(url).get("connection_class", redis.Connection)]
            return super().from_url(url, connection_class=connection_class, **kwargs)
        options: dict[str, Any] = parse_url(sentinel.master) | kwargs
        del options["host"]
        options["connection_class"] = SentinelManagedSSLConnection if sentinel.is_tls else SentinelManagedConnection
        tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
        asked = {
            "socket_timeout": SENTINEL_TIMEOUT_S,
            "socket_connect_timeout": SENTINEL_TIMEOUT_S,
            "ssl": sentinel.is_tls,
            **sentinel.credentials,
            **tls,
        }
        sentinels = Sentinel(sentinel.sentinels, sentinel_kwargs=asked)
        return cls.from_pool(SentinelConnectionPool(sentinel.service, sentinels, **options))


def _check_login(client: redis.Redis) -> None:
    """Raise SettingsError if Redis refuses the user, the password or the database, or what answers is no Redis.

    A Redis that cannot be reached is no error here: RQ ends with a sentence then.
    """
    with client:
        try:
            client.ping()
        except ResponseError as error:
            raise SettingsError(f"Redis refuses the connection: {error}") from None
        except RedisTimeoutError:  # RQ would show a traceback
            raise SettingsError("no Redis answers at the URL: it timed out") from None
        except (RedisConnectionError, OSError) as error:
            # redis-py wraps the AuthenticationError of a unix socket in a ConnectionError
            if isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError):
                raise SettingsError("Redis refuses the user or the password of the URL") from None
        except Exception as error:  # redis-py raises anything at replies that are none of Redis's
            raise SettingsError(f"what answers at the URL is no Redis: {error!r}") from None
