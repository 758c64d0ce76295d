"""The form of SCOREPOOL_REDIS_URL that names the master through Sentinel. All other forms are redis-py's own.

    redis+sentinel://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]/SERVICE[/DB][?OPTIONS]

`rediss+sentinel` is the same over TLS, to the sentinels too. The options are redis-py's, and `sentinel_username` and
`sentinel_password`.
"""

from typing import Self
from urllib.parse import urlencode, urlsplit

from msgspec import Struct

from scorepool.store.redis_url import check_redis_url, is_database, parse_options, split_redis_url
from scorepool.store.settings import SettingsError

SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
DEFAULT_PORT = 26379
FORM = "redis+sentinel://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]/SERVICE[/DB][?OPTIONS]"


class SentinelUrl(Struct, frozen=True):
    sentinels: list[tuple[str, int]]
    credentials: dict[str, str]  # `username` and `password` for the sentinels
    service: str
    master: str  # redis-py's URL of the master, without host and port
    is_tls: bool

    @classmethod
    def parse(cls, url: str) -> Self | None:
        """Parse a URL; check it and return None if it does not use Sentinel.

        Raises SettingsError. The message leaves out the URL, which may hold a password.
        """
        scheme, _, rest = url.partition("://")
        if scheme not in SCHEMES:
            check_redis_url(url)
            return None
        parts = split_redis_url(f"//{rest}")
        user, at, hosts = parts.netloc.rpartition("@")
        try:
            sentinels = [_address(host) for host in hosts.split(",")]
        except ValueError:
            raise SettingsError(f"the Redis URL has a bad HOST:PORT; expected {FORM}") from None
        service, _, db = parts.path.strip("/").partition("/")
        if not service or not is_database(db):
            raise SettingsError(
                f"the Redis URL lacks SERVICE, the sentinels' name of the master, or has a bad DB; expected {FORM}"
            )
        options = parse_options(parts.query)
        names = ("username", "password")
        credentials = {name: value for name in names if (value := options.pop(f"sentinel_{name}", ""))}
        master = f"{SCHEMES[scheme]}://{user}{at}master/{db or 0}?{urlencode(options)}"
        check_redis_url(master)
        return cls(sentinels, credentials, service, master, scheme.startswith("rediss"))


def _address(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError
    return parts.hostname, parts.port or DEFAULT_PORT
