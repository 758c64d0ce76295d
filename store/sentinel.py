"""The form of SCOREPOOL_REDIS_URL that names the master through Sentinel. All other forms are redis-py's own.

    redis+sentinel://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]/SERVICE[/DB][?OPTIONS]

`rediss+sentinel` is the same over TLS, to the sentinels too. The options are redis-py's, and `sentinel_username` and
`sentinel_password`.
"""

from typing import Self
from urllib.parse import parse_qsl, urlencode, urlsplit

from msgspec import Struct

from scorepool.store.settings import SettingsError

SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
DEFAULT_PORT = 26379
FORM = "redis+sentinel://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]/SERVICE[/DB][?OPTIONS]"
REDIS_URL_FORMS = (
    "redis://[[USER]:PASSWORD@]HOST[:PORT][/DB], rediss://, unix://PATH or redis+sentinel://, "
    "with special characters of the password percent-encoded"
)


class SentinelUrl(Struct, frozen=True):
    sentinels: list[tuple[str, int]]
    credentials: dict[str, str]  # `username` and `password` for the sentinels
    service: str
    master: str  # redis-py's URL of the master, without host and port
    is_tls: bool

    @classmethod
    def parse(cls, url: str) -> Self | None:
        """Parse a URL; return None if it does not use Sentinel.

        Raise SettingsError if it is wrong, or if its database is no number, which redis-py reads as database 0. The
        message leaves out the URL, which may hold a password.
        """
        scheme, _, rest = url.partition("://")
        if scheme in SCHEMES.values() and not _is_database(urlsplit(url).path.strip("/")):
            raise SettingsError("the database of the Redis URL is no number; expected redis://HOST[:PORT][/DB]")
        if scheme not in SCHEMES:
            return None
        parts = urlsplit(f"//{rest}")
        user, at, hosts = parts.netloc.rpartition("@")
        try:
            sentinels = [_address(host) for host in hosts.split(",")]
        except ValueError:
            raise SettingsError(f"the Redis URL has a bad HOST:PORT; expected {FORM}") from None
        service, _, db = parts.path.strip("/").partition("/")
        if not service or not _is_database(db):
            raise SettingsError(
                f"the Redis URL lacks SERVICE, the sentinels' name of the master, or has a bad DB; expected {FORM}"
            )
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        names = ("username", "password")
        credentials = {name: value for name in names if (value := options.pop(f"sentinel_{name}", ""))}
        master = f"{SCHEMES[scheme]}://{user}{at}master/{db or 0}?{urlencode(options)}"
        return cls(sentinels, credentials, service, master, scheme.startswith("rediss"))


def _is_database(text: str) -> bool:
    """True if the text is the number of a database, or empty, which means 0."""
    return not text or text.isdecimal()


def _address(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError
    return parts.hostname, parts.port or DEFAULT_PORT
