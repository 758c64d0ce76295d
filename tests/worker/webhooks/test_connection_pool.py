"""Connections to receivers are reused for a limited time, and never beyond the addresses that were checked."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from scorepool.store import Settings
from scorepool.worker.webhooks import connection_pool
from scorepool.worker.webhooks import sender as sender_module
from scorepool.worker.webhooks.sender import Sender
from tests.worker.webhooks.test_sender import BODY, OLD

RESPONSE = b"HTTP/1.1 204 No Content\r\n\r\n"
Conversation = Callable[[socket.socket, int], None]


def read(connection: socket.socket) -> None:
    """Read one request of the sender; raise ConnectionError at the end of the connection."""
    message = b""
    while BODY not in message:
        data = connection.recv(65536)
        if not data:
            raise ConnectionError
        message += data


def respond_always(connection: socket.socket, number: int) -> None:
    while True:
        read(connection)
        connection.sendall(RESPONSE)


@contextmanager
def server(talk: Conversation) -> Iterator[tuple[str, list[socket.socket]]]:
    """Yield a URL and the list of accepted connections.

    `talk` is called with each connection and its number. The connection is closed when it returns.
    """
    accepted: list[socket.socket] = []

    def serve(connection: socket.socket, number: int) -> None:
        with connection:
            try:
                talk(connection, number)
            except OSError:  # the sender closed the connection
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # the test has ended
                return
            accepted.append(connection)
            threading.Thread(target=serve, args=(connection, len(accepted)), daemon=True).start()

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/", accepted


TIMEOUT_S = 14.0  # of an attempt; less than connection_pool.IDLE_TIMEOUT_S


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender(Settings(webhook_allow_private=True, webhook_timeout_s=TIMEOUT_S))
    yield sender
    sender.close()


def test_deliveries_to_one_origin_share_a_connection(sender: Sender):
    with server(respond_always) as (url, accepted):
        for number in range(5):
            assert sender.send(f"{url}{number}", f"wh_{number}", BODY, [OLD]).is_delivered

    assert len(accepted) == 1


def test_every_attempt_on_a_kept_connection_has_the_full_timeout(sender: Sender, monkeypatch: pytest.MonkeyPatch):
    monotonic, passed_s = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed_s)
    with server(respond_always) as (url, accepted):
        for _ in range(3):
            assert sender.send(url, "wh_1", BODY, [OLD]).is_delivered
            passed_s += 0.6 * TIMEOUT_S  # three attempts together take longer than one timeout

    assert len(accepted) == 1


def test_a_receiver_that_falls_silent_on_a_kept_connection_times_out(sender: Sender):
    """The receiver stays silent until the sender closes the connection."""
    was_closed = threading.Event()

    def respond_once(connection: socket.socket, number: int) -> None:
        read(connection)
        connection.sendall(RESPONSE)
        with suppress(ConnectionError):
            read(connection)
            read(connection)
        was_closed.set()

    with server(respond_once) as (url, accepted):
        assert sender.send(url, "wh_1", BODY, [OLD]).is_delivered
        sender._timeout_s = 0.5
        attempt = sender.send(url, "wh_2", BODY, [OLD])
        assert was_closed.wait(60)

    assert attempt.status is None
    assert (attempt.error or "").partition(":")[0].endswith("Timeout")
    assert len(accepted) == 1


@pytest.mark.parametrize("when", ["while it is idle", "when it is used"])
def test_if_the_receiver_closed_the_connection_the_same_attempt_uses_a_new_one(sender: Sender, when: str):
    is_closed = threading.Event()

    def close_connection(connection: socket.socket, number: int) -> None:
        read(connection)
        connection.sendall(RESPONSE)
        if number == 1 and when == "when it is used":
            read(connection)
        connection.close()
        is_closed.set()

    with server(close_connection) as (url, accepted):
        assert sender.send(url, "wh_1", BODY, [OLD]).is_delivered
        if when == "while it is idle":
            assert is_closed.wait(60)
        assert sender.send(url, "wh_2", BODY, [OLD]).is_delivered

    assert len(accepted) == 2


@pytest.mark.parametrize("when", ["with the response", "later"])
def test_an_unsolicited_response_is_not_read_as_the_response_to_the_next_request(sender: Sender, when: str):
    extra = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    response_read, sent_extra = threading.Event(), threading.Event()

    def respond_twice(connection: socket.socket, number: int) -> None:
        read(connection)
        if when == "with the response":
            connection.sendall(RESPONSE + extra)
        else:
            connection.sendall(RESPONSE)
            response_read.wait(60)
            connection.sendall(extra)
        sent_extra.set()
        read(connection)

    with server(respond_twice) as (url, accepted):
        assert sender.send(url, "wh_1", BODY, [OLD]).status == 204
        response_read.set()
        assert sent_extra.wait(60)
        assert sender.send(url, "wh_2", BODY, [OLD]).status == 204

    assert len(accepted) == 2


@pytest.mark.parametrize("limit", ["IDLE_TIMEOUT_S", "MAX_AGE_S"])
def test_an_expired_connection_is_replaced_by_one_to_a_newly_resolved_address(
    sender: Sender, monkeypatch: pytest.MonkeyPatch, limit: str
):
    lookups: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        lookups.append(host)
        return ["127.0.0.1"] if len(lookups) == 1 else ["127.0.0.2"]  # no receiver listens there

    monkeypatch.setattr(sender_module, "resolve", resolve)
    with server(respond_always) as (url, _accepted):
        url = url.replace("127.0.0.1", "hooks.example")
        for _ in range(2):
            assert sender.send(url, "wh_1", BODY, [OLD]).is_delivered
        monkeypatch.setattr(connection_pool, limit, 0.0)
        attempt = sender.send(url, "wh_2", BODY, [OLD])

    assert lookups == ["hooks.example"] * 2
    assert (attempt.error or "").startswith("ConnectError")


def test_a_response_that_is_too_long_closes_its_connection(sender: Sender):
    def send_long_response(connection: socket.socket, number: int) -> None:
        read(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 1_000_000)
        connection.recv(1)

    with server(send_long_response) as (url, accepted):
        assert sender.send(url, "wh_1", BODY, [OLD]).is_delivered
        assert sender.send(url, "wh_2", BODY, [OLD]).is_delivered

    assert len(accepted) == 2


def test_idle_connections_are_closed(sender: Sender, monkeypatch: pytest.MonkeyPatch):
    with server(respond_always) as (url, accepted):
        assert sender.send(url, "wh_1", BODY, [OLD]).is_delivered
        sender.evict_idle_connections()
        assert accepted[0].fileno() >= 0
        monkeypatch.setattr(connection_pool, "IDLE_TIMEOUT_S", 0.0)
        sender.evict_idle_connections()
        deadline = time.monotonic() + 60
        while (
            accepted[0].fileno() >= 0 and time.monotonic() < deadline
        ):  # until the server sees the end of the connection
            time.sleep(0.01)
        assert accepted[0].fileno() == -1
