"""A Redis URL with which a process could not work is refused before the process starts, and no password is shown."""

import inspect
from itertools import product

import pytest
import redis.asyncio
import redis.connection

from scorepool.api.connection import connect
from scorepool.store import SentinelUrl, SettingsError
from scorepool.worker.rq.connection import Redis

BAD = {
    "redis://h?nonsense=1": "the option 'nonsense'; expected one of db, username",
    "redis://h?socket_timeout=abc": "the option socket_timeout of the Redis URL: Expected `float`",
    "redis://h?socket_timeout=nan": "socket_timeout of the Redis URL: Expected `float` >= 2.0",
    "redis://h?socket_timeout=0.5": "socket_timeout of the Redis URL: Expected `float` >= 2.0",
    "redis://h?socket_timeout=1e999": "socket_timeout of the Redis URL: Number out of range",
    "redis://h?db=x": "the option db of the Redis URL: Expected `int`",
    "redis://h?db=": "the option db of the Redis URL: Expected `int`",
    "redis://h?db=1&db=2": "given twice",
    "redis://h?protocol=9": "protocol of the Redis URL: Expected `int` <= 3",
    "redis://h?max_connections=-1": "max_connections of the Redis URL: Expected `int` >= 16",
    "redis://h?health_check_interval=-5": "health_check_interval of the Redis URL: Expected `int` >= 0",
    "redis://h?socket_keepalive=maybe": "socket_keepalive of the Redis URL: Expected `str` matching",
    "redis://h?client_name=a%20b": "client_name of the Redis URL: Expected `str` matching",
    "redis://h?decode_responses=true": "the option 'decode_responses'",
    "redis://h?host=other": "the option 'host'",
    "redis://h?retry=5": "the option 'retry'",
    "redis://h?ssl_ca_certs=/x": "the option ssl_ca_certs needs a rediss:// URL",
    "rediss://h?ssl_ca_certs=/no/such/file": "the TLS options (ssl_...) of the Redis URL: [Errno 2]",
    "rediss://h?ssl_cert_reqs=maybe": "ssl_cert_reqs of the Redis URL",
    "rediss://h?ssl_ciphers=none-such": "the TLS options (ssl_...)",
    "rediss://h?ssl_include_verify_flags=none-such": "the TLS options (ssl_...)",
    "rediss://h?ssl_min_version=1": "ssl_min_version of the Redis URL: Expected `int` >= 771",
    "redis://h:0": "HOST or PORT",
    "redis://h:65536": "HOST or PORT",
    "redis://[::1": "cannot be parsed",
    "redis://" + "a" * 70: "HOST or PORT",
    "redis://h/1/2": "the database of the Redis URL is no number",
    "redis://h/\N{ARABIC-INDIC DIGIT THREE}": "a character that is not ASCII",
    "http://h": "expected redis://",
    "h": "expected redis://",
    "": "expected redis://",
    "unix://": "lacks the path of its socket",
    "unix://host/path": "lacks the path of its socket",
    "unix:///a%00b": "lacks the path of its socket",
    "redis+sentinel://h:1/service?nonsense=1": "the option 'nonsense'",
    "redis+sentinel://h:1/service?db=x": "the option db",
    "rediss+sentinel://h:1/service?ssl_ca_certs=/no/such/file": "[Errno 2]",
}
GOOD = [
    "redis://",
    "redis://[::1]:6379/0",
    "redis://user:p%2F%40%23@h:1/3?db=2&socket_timeout=5&protocol=2&health_check_interval=30&client_name=api",
    "rediss://h?ssl_cert_reqs=none&ssl_check_hostname=no&ssl_min_version=772",
    "unix:///run/redis.sock?db=3&password=p%40",
    "unix://:p%2Fw@/run/redis.sock",
    "redis+sentinel://u:p@h:1,i/service/2?sentinel_username=x&sentinel_password=y&protocol=3",
]


def build_both(url: str) -> None:
    """Make a connection of the API and one of a worker, without connecting. Raises SettingsError."""
    pool = connect(url, 4.0, 1).connection_pool
    pool.make_connection()
    Redis._connect(url).connection_pool.make_connection()


@pytest.mark.parametrize(("url", "says"), BAD.items())
def test_a_bad_url_is_refused_in_one_sentence(url: str, says: str):
    with pytest.raises(SettingsError) as caught:
        SentinelUrl.parse(url)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", GOOD)
def test_a_good_url_is_taken(url: str):
    build_both(url)


@pytest.mark.parametrize("separator", ["/", "?", "#", "@/", "/@", "?a=", "%", "[", "\\", " "])
@pytest.mark.parametrize(
    "form",
    [
        "redis://u:1{}hush@h:1/0",
        "redis://:{}hush@h:1/0",
        "rediss://:x{}hush@h",
        "unix://:1{}hush@/run/s",
        "redis+sentinel://u:1{}hush@h:1/service",
    ],
)
def test_a_password_that_is_not_percent_encoded_is_not_shown(form: str, separator: str):
    url = form.format(separator)
    said = ""
    try:
        sentinel = SentinelUrl.parse(url)
    except SettingsError as error:
        said = str(error)
    else:  # taken whole
        assert redis.connection.parse_url(sentinel.master if sentinel else url)["password"].endswith("hush")
    assert "hush" not in said


def test_every_option_of_redis_py_is_refused_or_works():
    """An option that is taken builds a connection of the API and of a worker, with each of many values."""
    classes = (redis.connection.SSLConnection, redis.connection.AbstractConnection, redis.connection.ConnectionPool)
    names = {name for one in classes for name in inspect.signature(one.__init__).parameters}
    names |= {name for one in (redis.Redis, redis.asyncio.Redis) for name in inspect.signature(one).parameters}
    names |= set(redis.connection.URL_QUERY_ARGUMENT_PARSERS)
    values = ["", "x", "true", "no", "-1", "0", "2", "16", "1e999", "nan"]
    tls_values = ["", "x", "no", "771"]  # fewer, because each reads the system's certificates
    pairs = [*product((name for name in names if not name.startswith("ssl")), values)]
    pairs += [*product((name for name in names if name.startswith("ssl")), tls_values)]
    num_taken = 0
    for name, value in pairs:
        url = f"{'rediss' if name.startswith('ssl') else 'redis'}://h?{name}={value}"
        try:
            SentinelUrl.parse(url)
        except SettingsError:
            continue
        build_both(url)
        num_taken += 1
    assert num_taken > 10
