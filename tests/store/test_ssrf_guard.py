"""SsrfGuard: the addresses that a webhook may connect to, and its deadline."""

import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import httpcore
import pytest

from scorepool.store.ssrf_guard import BlockedAddress, SsrfGuard, resolve
from tests.worker.receiver import raw_server


def resolver(*addresses: str) -> Callable[[str, int], "Future[list[str]]"]:
    """Return a lookup that finds these addresses for every name."""

    def lookup(host: str, port: int) -> "Future[list[str]]":
        future: Future[list[str]] = Future()
        future.set_result(list(addresses))
        return future

    return lookup


def system(host: str, port: int) -> "Future[list[str]]":
    """Use the system's resolver, which parses numeric hosts without a network."""
    future: Future[list[str]] = Future()
    future.set_result(resolve(host, port))
    return future


def read_all(stream: httpcore.NetworkStream) -> None:
    while stream.read(1):
        pass


def guard(
    lookup: Callable[[str, int], "Future[list[str]]"], allow_private: bool = False, timeout_s: float = 60
) -> SsrfGuard:
    return SsrfGuard(time.monotonic() + timeout_s, lookup, allow_private)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "127.0.1",
        "127.255.255.254",
        "2130706433",
        "0x7f000001",
        "0X7F.0.0.1",
        "0x7f.1",
        "017700000001",
        "0177.0.0.1",
        "0177.1",
        "0",
        "0.0.0.0",
        "0x0",
        "10.1",
        "0xa000001",
        "012.0.0.1",
        "172.16.0.1",
        "172.1048577",
        "192.168.1",
        "0xc0a80001",
        "169.254.169.254",
        "2852039166",
        "0251.0376.0251.0376",
        "100.64.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "4294967295",
        "localhost",
        "::1",
        "::",
        "0:0:0:0:0:0:0:1",
        "::ffff:127.0.0.1",
        "::ffff:a00:1",
        "::127.0.0.1",
        "64:ff9b::127.0.0.1",
        "64:ff9b:1::a00:1",
        "2002:7f00:1::1",
        "2001:0:53aa:64c:0:0:80ff:fffe",
        "fe80::1",
        "fd00::1",
        "fec0::1",
        "ff02::1",
    ],
)
def test_every_spelling_of_a_private_address_is_blocked(host: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "create_connection", lambda *_args, **_options: pytest.fail("it connected"))
    with pytest.raises(BlockedAddress, match="not public"):
        guard(system).connect_tcp(host, 443)


@pytest.mark.parametrize(
    "addresses",
    [
        ["93.184.215.14", "10.0.0.1"],
        ["10.0.0.1", "93.184.215.14"],
        ["2606:4700::1", "::1"],
        ["93.184.215.14", "fe80::1%eth0"],
    ],
)
def test_one_private_address_among_public_ones_blocks_the_name(addresses: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "create_connection", lambda *_args, **_options: pytest.fail("it connected"))
    with pytest.raises(BlockedAddress, match=r"hooks\.example"):
        guard(resolver(*addresses)).connect_tcp("hooks.example", 443)


def test_dns_rebinding_after_the_check_has_no_effect(monkeypatch: pytest.MonkeyPatch):
    """The attacker's resolver returns a public address first, and loopback at every later lookup."""
    lookups: list[str] = []
    connected: list[tuple[str, int]] = []

    def rebinding(host: str, port: int) -> "Future[list[str]]":
        lookups.append(host)
        return resolver("93.184.215.14" if len(lookups) == 1 else "127.0.0.1")(host, port)

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        connected.append(address)
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    backend = guard(rebinding)
    backend.connect_tcp("hooks.example", 443).close()

    assert lookups == ["hooks.example"]
    assert connected == [("93.184.215.14", 443)]
    with pytest.raises(BlockedAddress):
        backend.connect_tcp("hooks.example", 443)


def test_unix_sockets_are_refused():
    with pytest.raises(BlockedAddress):
        guard(system, allow_private=True).connect_unix_socket("/var/run/docker.sock")


def test_the_next_address_is_tried_if_one_does_not_respond():
    with raw_server(lambda connection: connection.sendall(b"hello")) as port:
        closed = socket.create_server(("127.0.0.2", 0))
        closed.close()
        stream = guard(resolver("127.0.0.2", "127.0.0.1"), allow_private=True).connect_tcp("hooks.example", port)
        assert stream.read(5) == b"hello"
        stream.close()


def test_a_name_without_an_address_is_a_connect_error():
    def fails(host: str, port: int) -> "Future[list[str]]":
        future: Future[list[str]] = Future()
        future.set_exception(socket.gaierror(-2, "Name or service not known"))
        return future

    with pytest.raises(httpcore.ConnectError, match=r"cannot look up hooks\.example"):
        guard(fails).connect_tcp("hooks.example", 443)
    with pytest.raises(httpcore.ConnectError, match="no address"):
        guard(resolver()).connect_tcp("hooks.example", 443)


def test_a_lookup_that_hangs_ends_at_the_deadline():
    with pytest.raises(httpcore.ConnectTimeout, match="lookup"):
        guard(lambda host, port: Future(), timeout_s=0.05).connect_tcp("hooks.example", 443)


def test_a_response_that_arrives_byte_by_byte_ends_at_the_deadline():
    def drip(connection: socket.socket) -> None:
        while True:
            connection.sendall(b"x")
            time.sleep(0.01)

    with raw_server(drip) as port:
        backend = guard(system, allow_private=True)
        stream = backend.connect_tcp("127.0.0.1", port)
        backend.deadline = time.monotonic() + 0.3
        with pytest.raises(httpcore.ReadTimeout):
            read_all(stream)
        stream.close()


def test_a_tls_handshake_that_hangs_ends_at_the_deadline():
    is_closed = threading.Event()

    def read_only(connection: socket.socket) -> None:
        while connection.recv(4096):
            pass
        is_closed.set()

    with raw_server(read_only) as port:
        backend = guard(system, allow_private=True)
        stream = backend.connect_tcp("127.0.0.1", port)
        backend.deadline = time.monotonic() + 0.3
        with pytest.raises(httpcore.ConnectTimeout):
            stream.start_tls(ssl.create_default_context(), "hooks.example")
        assert is_closed.wait(60)


def test_a_write_that_the_receiver_does_not_read_ends_at_the_deadline():
    done = threading.Event()
    with raw_server(lambda _connection: done.wait(60) and None) as port:
        backend = guard(system, allow_private=True)
        stream = backend.connect_tcp("127.0.0.1", port)
        backend.deadline = time.monotonic() + 0.3
        with pytest.raises(httpcore.WriteTimeout):
            stream.write(b"x" * 50_000_000)
        stream.close()
        done.set()
