"""Connections to receivers are used again while they last, and never beyond what was checked when they were made."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from scorepool.store import Settings
from scorepool.worker.webhooks import connection_pool as connections
from scorepool.worker.webhooks import sender as delivery
from scorepool.worker.webhooks.sender import Sender
from tests.worker.webhooks.test_sender import BODY, OLD

ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"
Talk = Callable[[socket.socket, int], None]


def read(connection: socket.socket) -> None:
    """One message of the sender's. Raises ConnectionError at the connection's end."""
    message = b""
    while BODY not in message:
        data = connection.recv(65536)
        if not data:
            raise ConnectionError
        message += data


def answer_all(connection: socket.socket, number: int) -> None:
    while True:
        read(connection)
        connection.sendall(ANSWER)


@contextmanager
def server(talk: Talk) -> Iterator[tuple[str, list[socket.socket]]]:
    """Yields a URL, and the connections that came. `talk` has each, with its number, and hangs up when it returns."""
    came: list[socket.socket] = []

    def serve(connection: socket.socket, number: int) -> None:
        with connection:
            try:
                talk(connection, number)
            except OSError:  # the sender has gone
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # the test is over
                return
            came.append(connection)
            threading.Thread(target=serve, args=(connection, len(came)), daemon=True).start()

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/", came


LIMIT_S = 14.0  # of an attempt; below connections.IDLE_S


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender(Settings(webhook_secret=OLD, webhook_allow_private=True, webhook_timeout_s=LIMIT_S))
    yield sender
    sender.close()


def test_deliveries_to_one_place_share_a_connection(sender: Sender):
    with server(answer_all) as (url, came):
        for number in range(5):
            assert sender.send(f"{url}{number}", f"wh_{number}", BODY).is_delivered

    assert len(came) == 1


def test_every_attempt_on_a_connection_has_all_of_its_time(sender: Sender, monkeypatch: pytest.MonkeyPatch):
    right, passed_s = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: right() + passed_s)
    with server(answer_all) as (url, came):
        for _ in range(3):
            assert sender.send(url, "wh_1", BODY).is_delivered
            passed_s += 0.6 * LIMIT_S  # together more than the limit of one attempt

    assert len(came) == 1


def test_a_receiver_that_falls_silent_on_a_kept_connection_is_left_in_time(sender: Sender):
    """It is silent until it is left."""
    was_left = threading.Event()

    def answer_once(connection: socket.socket, number: int) -> None:
        read(connection)
        connection.sendall(ANSWER)
        with suppress(ConnectionError):
            read(connection)
            read(connection)
        was_left.set()

    with server(answer_once) as (url, came):
        assert sender.send(url, "wh_1", BODY).is_delivered
        sender._timeout_s = 0.5
        attempt = sender.send(url, "wh_2", BODY)
        assert was_left.wait(60)

    assert attempt.status is None
    assert (attempt.error or "").partition(":")[0].endswith("Timeout")
    assert len(came) == 1


@pytest.mark.parametrize("when", ["while it is idle", "when it is used"])
def test_a_receiver_that_hangs_up_is_told_on_a_new_connection_in_the_same_attempt(sender: Sender, when: str):
    hung_up = threading.Event()

    def hang_up(connection: socket.socket, number: int) -> None:
        read(connection)
        connection.sendall(ANSWER)
        if number == 1 and when == "when it is used":
            read(connection)
        connection.close()
        hung_up.set()

    with server(hang_up) as (url, came):
        assert sender.send(url, "wh_1", BODY).is_delivered
        if when == "while it is idle":
            assert hung_up.wait(60)
        assert sender.send(url, "wh_2", BODY).is_delivered

    assert len(came) == 2


@pytest.mark.parametrize("when", ["with the answer", "later"])
def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next_ones(sender: Sender, when: str):
    more = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    is_told, said_more = threading.Event(), threading.Event()

    def answer_twice(connection: socket.socket, number: int) -> None:
        read(connection)
        if when == "with the answer":
            connection.sendall(ANSWER + more)
        else:
            connection.sendall(ANSWER)
            is_told.wait(60)
            connection.sendall(more)
        said_more.set()
        read(connection)

    with server(answer_twice) as (url, came):
        assert sender.send(url, "wh_1", BODY).status == 204
        is_told.set()
        assert said_more.wait(60)
        assert sender.send(url, "wh_2", BODY).status == 204

    assert len(came) == 2


@pytest.mark.parametrize("limit", ["IDLE_S", "AGE_S"])
def test_after_a_while_the_name_is_looked_up_and_checked_again(
    sender: Sender, monkeypatch: pytest.MonkeyPatch, limit: str
):
    """What the name means by then is checked and connected to, not what it meant before."""
    asked: list[str] = []

    def addresses(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]  # where nobody listens

    monkeypatch.setattr(delivery, "addresses", addresses)
    with server(answer_all) as (url, _came):
        url = url.replace("127.0.0.1", "hooks.example")
        for _ in range(2):
            assert sender.send(url, "wh_1", BODY).is_delivered
        monkeypatch.setattr(connections, limit, 0.0)
        attempt = sender.send(url, "wh_2", BODY)

    assert asked == ["hooks.example"] * 2
    assert (attempt.error or "").startswith("ConnectError")


def test_an_answer_that_is_cut_off_ends_its_connection(sender: Sender):
    def pour(connection: socket.socket, number: int) -> None:
        read(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 1_000_000)
        connection.recv(1)

    with server(pour) as (url, came):
        assert sender.send(url, "wh_1", BODY).is_delivered
        assert sender.send(url, "wh_2", BODY).is_delivered

    assert len(came) == 2


def test_what_nobody_used_for_long_is_closed(sender: Sender, monkeypatch: pytest.MonkeyPatch):
    with server(answer_all) as (url, came):
        assert sender.send(url, "wh_1", BODY).is_delivered
        sender.tidy()
        assert came[0].fileno() >= 0
        monkeypatch.setattr(connections, "IDLE_S", 0.0)
        sender.tidy()
        deadline = time.monotonic() + 60
        while came[0].fileno() >= 0 and time.monotonic() < deadline:  # the server's side sees the end
            time.sleep(0.01)
        assert came[0].fileno() == -1
