"""Check a Redis URL before processes are started with it."""

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.retry import Retry

from scorepool import store

TIMEOUT_S = 2.0


def check_redis_url(url: str, setting: str) -> None:
    """Raise SettingsError, which names the setting, if the URL is malformed or Redis refuses its user or password.

    A Redis that does not answer is no error: every process waits for it. A Sentinel URL is only parsed.
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
    except ValueError:  # its text may contain a part of the password
        raise store.SettingsError(f"{setting}: the URL cannot be parsed; see docs/settings.md") from None
    except (RedisError, OSError):
        return
