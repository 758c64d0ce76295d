"""Check the URL of Redis before a process starts with it.

redis-py passes options that it does not know on to its connections, which fail when they are first used, and it takes
values with which no connection works. Here an option is known, has a value within its bounds, and does not change what
our processes need: replies as bytes, our own retries.
"""

import ssl
from typing import Annotated, Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import msgspec
from msgspec import Meta, Struct
from redis.asyncio.connection import SSLConnection, parse_url
from redis.exceptions import RedisError

from scorepool.store.settings import SettingsError

REDIS_URL_FORMS = (
    "redis://[[USER]:PASSWORD@]HOST[:PORT][/DB], rediss://, unix://PATH or redis+sentinel://, "
    "with special characters of the password percent-encoded"
)

Text = Annotated[str, Meta(min_length=1)]
Switch = Annotated[str, Meta(pattern=r"^(?i:0|1|f|t|false|true|n|y|no|yes)\Z")]
Timeout = Annotated[float, Meta(ge=2, le=60)]  # seconds; a read of the API's streams blocks for one


class _Options(Struct):
    """The options of a URL. Field names are redis-py's; a URL gives any of them."""

    db: Annotated[int, Meta(ge=0)] = 0
    username: Text = ""
    password: Text = ""
    client_name: Annotated[str, Meta(pattern=r"^[!-~]+\Z")] = ""
    protocol: Annotated[int, Meta(ge=2, le=3)] = 3
    socket_timeout: Timeout = 10.0
    socket_connect_timeout: Timeout = 10.0
    socket_keepalive: Switch = "no"
    health_check_interval: Annotated[int, Meta(ge=0, le=3600)] = 0  # seconds
    max_connections: Annotated[int, Meta(ge=16, le=100_000)] = 64


class _TlsOptions(_Options):
    """The options of a `rediss` URL."""

    ssl_ca_certs: Text = ""
    ssl_ca_path: Text = ""
    ssl_ca_data: Text = ""
    ssl_certfile: Text = ""
    ssl_keyfile: Text = ""
    ssl_password: Text = ""
    ssl_cert_reqs: Annotated[str, Meta(pattern=r"^(none|optional|required)\Z")] = "required"
    ssl_check_hostname: Switch = "yes"
    ssl_min_version: Annotated[int, Meta(ge=int(ssl.TLSVersion.TLSv1_2), le=int(ssl.TLSVersion.TLSv1_3))] = 771
    ssl_ciphers: Text = ""
    ssl_include_verify_flags: Text = ""
    ssl_exclude_verify_flags: Text = ""


def check_redis_url(url: str) -> None:
    """Raise SettingsError if redis-py, or a process of ours, could not work with a URL that does not use Sentinel.

    The message shows no part of the URL but the names of options, because it may hold a password.
    """
    parts = split_redis_url(url)
    if not url.startswith(("redis://", "rediss://", "unix://")):  # redis-py knows them in lower case only
        raise SettingsError(f"the Redis URL cannot be parsed; expected {REDIS_URL_FORMS}")
    if parts.scheme == "unix":
        _check_path(parts)
    else:
        _check_address(parts)
    _check_options(parse_options(parts.query), _TlsOptions if parts.scheme == "rediss" else _Options)
    if parts.scheme == "rediss":
        _check_tls(url)


def has_password(url: str) -> bool:
    """True if a URL that was checked holds a password."""
    parts = urlsplit(url)
    return bool(parts.password) or any(name.endswith("password") for name in parse_options(parts.query))


def split_redis_url(url: str) -> SplitResult:
    """Split a URL whose parts cannot be taken for one another. Raises SettingsError."""
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise SettingsError("the Redis URL has a space or a character that is not ASCII; percent-encode it")
    try:
        parts = urlsplit(url)
    except ValueError:  # its text may contain a part of the password
        raise SettingsError(f"the Redis URL cannot be parsed; expected {REDIS_URL_FORMS}") from None
    if "@" in parts.path + parts.query or "#" in url:  # otherwise a part of the password is read as path or option
        raise SettingsError(
            "the Redis URL has a `#`, or an `@` after the first `/` or `?`: percent-encode the special characters of "
            "the password (`/` is %2F, `?` is %3F, `#` is %23, `@` is %40)"
        )
    return parts


def parse_options(query: str) -> dict[str, str]:
    """Return the options of a URL by name. Raises SettingsError if one is given twice."""
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    if len(options) < len(pairs):
        raise SettingsError("an option of the Redis URL is given twice")
    return options


def is_database(text: str) -> bool:
    """True if the text is the number of a database, or empty, which means 0."""
    return not text or text.isdecimal()


def _check_path(parts: SplitResult) -> None:
    path = unquote(parts.path)
    if parts.netloc.rpartition("@")[2] or not path.startswith("/") or "\0" in path:
        raise SettingsError("the Redis URL lacks the path of its socket; expected unix://[[USER]:PASSWORD@]/PATH")


def _check_address(parts: SplitResult) -> None:
    try:
        is_address = parts.port != 0 and bool(unquote(parts.hostname or "localhost").encode("idna"))
    except ValueError:  # its text may contain a part of the password
        is_address = False
    if not is_address:
        raise SettingsError(f"the HOST or PORT of the Redis URL cannot be parsed; expected {REDIS_URL_FORMS}")
    if not is_database(parts.path.strip("/")):  # redis-py would read it as database 0
        raise SettingsError("the database of the Redis URL is no number; expected redis://HOST[:PORT][/DB]")


def _check_options(options: dict[str, str], known: type[Struct]) -> None:
    for name, value in options.items():
        if name not in _TlsOptions.__struct_fields__:
            expected = ", ".join(_TlsOptions.__struct_fields__)
            raise SettingsError(f"the Redis URL has the option {name!r}; expected one of {expected}")
        if name not in known.__struct_fields__:
            raise SettingsError(f"the option {name} needs a rediss:// URL")
        try:
            msgspec.convert({name: value}, known, strict=False)
        except msgspec.ValidationError as error:
            expectation = str(error).partition(" - at")[0]
            raise SettingsError(f"the option {name} of the Redis URL: {expectation}") from None


def _check_tls(url: str) -> None:
    """Build the TLS context that each connection builds: read the certificates and the key."""
    try:
        options: dict[str, Any] = {name: value for name, value in parse_url(url).items() if name.startswith("ssl_")}
        SSLConnection(**options).ssl_context.get()
    except (OSError, ValueError, TypeError, RedisError) as error:
        raise SettingsError(f"the TLS options (ssl_...) of the Redis URL: {error}") from None
