"""Timeouts per progress: a message that moves is sent however long it takes; one that stands still is given up."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme
from redis.exceptions import TimeoutError as RedisTimeoutError

from scorepool.worker import Redis
from scorepool.worker.redis_link import progress_connection
from scorepool.worker.redis_link.progress_connection import socket_timeout
from scorepool.worker.rq import connection

SIZE = 2 * 1024 * 1024
TIMEOUT_S = 0.8
BUSY_S = 60.0  # that a busy machine may add
PLAIN: dict[str, Any] = {"driver_info": None, "protocol": 2, "socket_timeout": TIMEOUT_S, "retry": None}


class SlowServer:
    """A server that reads at `bytes_per_s`, up to `stop_at`, and answers a message of SIZE bytes."""

    def __init__(self, family: int, address: Any, tls: ssl.SSLContext | None) -> None:
        self.bytes_per_s = SIZE / 3
        self.stop_at = 2 * SIZE
        self.go_on = threading.Event()
        self.num_read = 0
        self.error: OSError | None = None
        self._tls = tls
        self._listening = socket.socket(family)
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * 1024)
        self._listening.bind(address)
        self._listening.listen()
        self.address = self._listening.getsockname()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        sock, _ = self._listening.accept()
        try:
            with sock if self._tls is None else self._tls.wrap_socket(sock, server_side=True) as sock:
                while self.num_read < SIZE:
                    if self.num_read >= self.stop_at:
                        self.go_on.wait()
                        self.stop_at = 2 * SIZE
                    received = len(sock.recv(16 * 1024))
                    if not received:
                        return
                    self.num_read += received
                    time.sleep(received / self.bytes_per_s)
                sock.sendall(b"+OK\r\n")
                sock.recv(1)
        except OSError as error:
            self.error = error

    def close(self) -> None:
        self.go_on.set()
        self.bytes_per_s = float("inf")
        self.thread.join()
        self._listening.close()


Connect = Callable[..., tuple[SlowServer, redis.Redis]]


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Start a server of a kind, and return it with a client."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # redis-py takes an unread ticket for a reply and connects again; the server accepts once
    authority.issue_cert("127.0.0.1").configure_cert(context)
    monkeypatch.setattr(connection, "_check_login", lambda client: None)
    opened: list[tuple[SlowServer, redis.Redis]] = []

    def start(kind: str = "redis", client_class: type[redis.Redis] = Redis) -> tuple[SlowServer, redis.Redis]:
        if kind == "unix":
            server = SlowServer(socket.AF_UNIX, str(tmp_path / "s"), None)
            url, options = f"unix://{server.address}", {}
        else:
            server = SlowServer(socket.AF_INET, ("127.0.0.1", 0), context if kind == "rediss" else None)
            url = f"{kind}://127.0.0.1:{server.address[1]}"
            options = {"ssl_ca_certs": str(tmp_path / "ca.pem")} if kind == "rediss" else {}
        client = client_class.from_url(url, **PLAIN, **options)
        opened.append((server, client))
        return opened[-1]

    yield start
    for server, client in opened:
        client.close()
        server.close()


def send(client: redis.Redis) -> object:
    """Send a message of SIZE bytes; return the reply."""
    around = len(client.connection_pool.get_encoder().encode("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2097152\r\n\r\n"))
    return client.execute_command("SET", "k", bytes(SIZE - around))


@pytest.mark.parametrize("kind", [pytest.param("redis", marks=pytest.mark.soak), "rediss", "unix"])
def test_a_message_that_moves_takes_as_long_as_it_needs(connect: Connect, kind: str):
    _, client = connect(kind)
    started_at = time.monotonic()

    assert send(client) is True

    assert time.monotonic() - started_at > 3 * TIMEOUT_S


def test_redis_pys_own_connection_gives_up(connect: Connect):
    _, client = connect(client_class=redis.Redis)
    with pytest.raises(RedisTimeoutError):
        send(client)


@pytest.mark.parametrize("kind", [pytest.param("redis", marks=pytest.mark.soak), "rediss", "unix"])
def test_a_message_that_stands_still_is_given_up_after_the_timeout(connect: Connect, kind: str):
    server, client = connect(kind)
    server.stop_at = SIZE // 4
    started_at = time.monotonic()

    with pytest.raises(RedisTimeoutError):
        send(client)

    assert time.monotonic() - started_at < SIZE / 4 / server.bytes_per_s + BUSY_S  # not for ever


def test_a_connection_that_is_given_up_sends_nothing_more(connect: Connect):
    server, client = connect()
    server.stop_at = SIZE // 4
    with pytest.raises(RedisTimeoutError):
        send(client)

    server.go_on.set()
    server.thread.join()

    assert server.num_read < SIZE / 2
    assert isinstance(server.error, ConnectionResetError)


def test_a_context_has_a_timeout_of_its_own(connect: Connect, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PLAIN, "socket_timeout", 2 * BUSY_S)
    server, client = connect()
    server.stop_at = 0
    started_at = time.monotonic()
    with socket_timeout(0.05), pytest.raises(RedisTimeoutError):
        client.execute_command("GET", "k")
    assert time.monotonic() - started_at < BUSY_S

    assert client.connection_pool.make_connection().socket_timeout == 2 * BUSY_S
    with socket_timeout(3.0):
        fresh = client.connection_pool.make_connection()
        assert (fresh.socket_timeout, fresh.socket_connect_timeout) == (3.0, 3.0)


def test_a_dead_peer_is_noticed_without_any_message(connect: Connect):
    _, client = connect()
    pooled = client.connection_pool.get_connection()
    sock = pooled._sock
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    for name, value in progress_connection._TCP_OPTIONS.items():
        assert sock.getsockopt(socket.IPPROTO_TCP, name) == value
    pooled.disconnect()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h/0", progress_connection.Connection),
        ("rediss://h/0", progress_connection.SSLConnection),
        ("unix:///s", progress_connection.UnixDomainSocketConnection),
        ("redis+sentinel://h/main", progress_connection.SentinelManagedConnection),
        ("rediss+sentinel://h/main", progress_connection.SentinelManagedSSLConnection),
    ],
)
def test_every_url_of_a_worker_gets_these_connections(url: str, expected: type):
    pool = Redis._connect(url).connection_pool
    assert pool.connection_class is expected
    assert isinstance(pool.make_connection(), expected)
