"""The proxy of the fleet's tests is a network as bad as it says, and no worse."""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tests.fleet.link import Link

PAYLOAD = b"x" * 1_000_000


@contextmanager
def connected(link: Link, timeout_s: float = 5.0) -> Iterator[Redis]:
    with Redis.from_url(link.url, socket_timeout=timeout_s, retry=None) as redis:
        yield redis


def elapsed_s(call: Callable[[], object]) -> float:
    started_at = time.monotonic()
    call()
    return time.monotonic() - started_at


def least_s(call: Callable[[], object]) -> float:
    """Return the shortest of some calls: a busy machine delays others."""
    return min(elapsed_s(call) for _ in range(20))


@pytest.fixture
def link(redis_url: str, redis: Redis) -> Iterator[Link]:
    with Link(redis_url) as link:
        yield link


def test_without_settings_it_passes_everything(link: Link):
    with connected(link) as redis:
        redis.set("key", PAYLOAD)

        assert redis.get("key") == PAYLOAD
        assert least_s(redis.ping) < 0.05


def test_a_round_trip_takes_the_delay_twice_and_a_new_connection_one_more(link: Link):
    link.change(delay_s=0.05)
    with connected(link) as redis:
        redis.client_setinfo("LIB-NAME", "test")  # redis-py's own handshake is over after it

        assert 0.099 <= least_s(redis.ping) < 0.15

    def connect() -> None:
        with socket.create_connection(("127.0.0.1", link.port)) as plain:
            plain.sendall(b"PING\r\n")
            assert plain.recv(100)

    assert 0.199 <= least_s(connect) < 0.26


def test_a_delay_does_not_limit_throughput(link: Link):
    link.change(delay_s=0.2)
    with connected(link) as redis:
        redis.ping()

        assert elapsed_s(lambda: redis.set("key", PAYLOAD * 10)) < 0.4 + 10  # a window of 64 KiB would take 60 s
        assert elapsed_s(lambda: redis.get("key")) < 0.4 + 10


def test_jitter_keeps_the_order(link: Link):
    link.change(jitter_s=0.02)
    with socket.create_connection(("127.0.0.1", link.port)) as plain:
        for number in range(50):
            plain.sendall(b"ECHO %03d\r\n" % number)
            time.sleep(0.001)
        received = b""
        while received.count(b"\r\n") < 100:
            received += plain.recv(10_000)

    assert received == b"".join(b"$3\r\n%03d\r\n" % number for number in range(50))


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("rate", [500_000, 4_000_000])
def test_a_rate_is_not_exceeded(link: Link, redis: Redis, direction: str, rate: int):
    payload = b"x" * rate  # one second's
    redis.set("key", payload)
    link.change(**{f"{direction}_bytes_s": rate})
    with connected(link, 60) as narrow:
        narrow.ping()

        assert elapsed_s(lambda: narrow.set("key", payload) if direction == "up" else narrow.get("key")) >= 0.85
    assert redis.strlen("key") == rate


@pytest.mark.soak  # a busy machine is slower
@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("rate", [500_000, 4_000_000])
def test_a_rate_is_kept_within_15_percent(link: Link, redis: Redis, direction: str, rate: int):
    payload = b"x" * rate  # one second's
    redis.set("key", payload)
    link.change(**{f"{direction}_bytes_s": rate})
    with connected(link, 10) as narrow:
        narrow.ping()

        for _ in range(20):  # a busy machine may be slower than the link
            needed_s = elapsed_s(lambda: narrow.set("key", payload) if direction == "up" else narrow.get("key"))
            assert needed_s >= 0.85
            if needed_s <= 1.15:
                break

    assert needed_s <= 1.15
    assert redis.strlen("key") == rate


def test_a_narrow_link_holds_its_sender_up(link: Link):
    link.change(up_bytes_s=100_000)
    with socket.create_connection(("127.0.0.1", link.port)) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
        plain.settimeout(0.5)
        with pytest.raises(TimeoutError):
            plain.sendall(b"*2\r\n$4\r\nECHO\r\n$1000000\r\n" + PAYLOAD)


def test_connections_of_a_narrow_link_take_turns(link: Link):
    link.change(up_bytes_s=500_000)
    with connected(link) as large, connected(link) as small:
        large.ping()
        small.ping()
        writer = threading.Thread(target=large.set, args=("key", PAYLOAD))
        writer.start()
        time.sleep(0.2)

        assert min(elapsed_s(small.ping) for _ in range(3)) < 0.5  # the other needs two seconds
        writer.join()


def pause_for(link: Link, seconds: float) -> None:
    link.pause()
    threading.Timer(seconds, link.restore).start()


def test_a_pause_delivers_everything_later(link: Link, redis: Redis):
    with connected(link, 60.0) as paused:
        paused.ping()
        assert elapsed_s(lambda: (pause_for(link, 0.5), paused.set("key", PAYLOAD))) >= 0.45
        assert redis.get("key") == PAYLOAD
        with connected(link) as new:
            assert elapsed_s(lambda: (pause_for(link, 0.5), new.ping())) >= 0.45


def test_a_sender_that_gave_up_in_a_pause_is_heard_later(link: Link, redis: Redis):
    with connected(link, 1.0) as paused:
        paused.ping()
        link.pause()
        with pytest.raises(RedisTimeoutError):
            paused.set("key", "late")
        assert redis.get("key") is None

        link.restore()
        deadline = time.monotonic() + 60
        while redis.get("key") is None:
            assert time.monotonic() < deadline


def test_a_drop_is_silent_and_its_connections_stay_half_open(link: Link, redis: Redis):
    with connected(link, 1.0) as old, connected(link, 1.0) as new:
        old.ping()
        connection = old.connection_pool.get_connection()
        link.drop()
        connection.send_command("SET", "key", "lost")
        with pytest.raises(RedisTimeoutError):
            connection.read_response(disconnect_on_error=False)
        with pytest.raises((RedisTimeoutError, RedisConnectionError)):
            new.ping()  # accepted, and nothing comes

        link.restore()
        with pytest.raises(RedisTimeoutError):
            connection.read_response(disconnect_on_error=False)
        assert connection.can_read() is False  # neither a byte nor an end
        assert redis.get("key") is None
        assert new.ping()  # of a connection after the drop
        connection.disconnect()


def test_redis_does_not_see_the_end_of_a_half_open_connection(link: Link, redis: Redis):
    with connected(link) as old:
        old.client_setname("half-open")
        link.drop()
    time.sleep(0.1)

    assert any(client["name"] == "half-open" for client in redis.client_list())
    link.cut()
    deadline = time.monotonic() + 60
    while any(client["name"] == "half-open" for client in redis.client_list()):
        assert time.monotonic() < deadline


def test_a_cut_resets_all_connections_and_new_ones_pass(link: Link):
    with connected(link) as redis:
        redis.ping()
        connection = redis.connection_pool.get_connection()
        link.cut()
        with pytest.raises(RedisConnectionError):
            connection.read_response()
        connection.disconnect()
        redis.connection_pool.release(connection)

        assert redis.ping()


@pytest.mark.parametrize("resets", [False, True])
def test_one_reply_is_lost_after_redis_has_run_its_command(link: Link, redis: Redis, resets: bool):
    with connected(link, 1.0) as client:
        client.ping()
        link.lose_next_reply(b"precious", resets=resets)
        assert client.echo("common") == b"common"
        with pytest.raises(RedisConnectionError if resets else RedisTimeoutError):
            client.eval("redis.call('INCR', 'runs') return 'precious'", 0)

        assert link.lost_reply.is_set()
        assert redis.get("runs") == b"1"
        assert client.echo("precious") == b"precious"  # on a new connection, and only one is lost


def test_a_long_write_never_passes_an_mtu_black_hole(link: Link, redis: Redis):
    link.change(largest_burst=1400)
    with connected(link, 1.0) as client:
        assert client.set("key", b"x" * 1000)
        with pytest.raises(RedisTimeoutError):
            client.set("key", b"x" * 2000)

    assert redis.strlen("key") == 1000


def test_a_reader_that_stands_still_holds_redis_up(link: Link, redis: Redis):
    redis.set("key", PAYLOAD * 20)
    with socket.create_connection(("127.0.0.1", link.port)) as plain:
        plain.sendall(b"GET key\r\n")
        time.sleep(0.3)
        assert link.num_bytes_down < 15_000_000
        received = 0
        for _ in itertools.count():
            received += len(plain.recv(1_000_000))
            if received >= 20_000_000:
                break


def test_a_redis_that_is_away_resets_connections():
    with Link("unix:///nonexistent/redis.sock") as link, connected(link) as redis, pytest.raises(RedisConnectionError):
        redis.ping()
