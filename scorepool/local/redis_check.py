"""Check a Redis URL before processes are started with it."""

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from scorepool import store

TIMEOUT_S = 2.0


def check_redis_url(url: str, setting: str, *, must_answer: bool) -> None:
    """Raise SettingsError, which names the setting, if the URL is malformed or Redis refuses its user or password.

    `must_answer`: raise it too if no Redis answers, because a worker ends then. The API waits for Redis. A Sentinel URL
    is only parsed.
    """
    try:
        if store.SentinelUrl.parse(url) is not None:
            return
        with Redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        ) as redis:
            redis.ping()
    except AuthenticationError as error:
        raise store.SettingsError(f"{setting}: Redis refuses the user or the password of the URL: {error}") from None
    except store.SettingsError as error:
        raise store.SettingsError(f"{setting}: {error}") from None
    except BusyLoadingError:  # Redis reads its data and will answer
        return
    except (RedisConnectionError, RedisTimeoutError) as error:
        if must_answer:
            raise store.SettingsError(f"{setting}: no Redis answers at the URL: {error}") from None
    except (RedisError, OSError):
        return
