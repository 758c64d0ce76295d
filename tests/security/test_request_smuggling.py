"""A request that servers may read differently gets one 400, the connection ends, and what follows is never a request.

On bare sockets. A second client's requests are answered meanwhile.
"""

import asyncio
import contextlib
import errno
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import uvicorn

from scorepool.api.http import protocol
from scorepool.api.http.protocol import FREE_CHUNKS, MAX_HEAD_BYTES, MAX_HEADERS, LingeringTransport, Protocol

LARGE = 30 * 2**20  # more than the kernel's buffers take
paths: list[str] = []  # of the requests that reached the application


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answer 200 with the number of bytes of the body."""
    if scope["type"] != "http":
        return
    paths.append(scope["path"])
    num_bytes, more = 0, scope["path"] != "/unread"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message["body"])
        more = message["more_body"]
    reply = b"a" * LARGE if scope["path"] == "/large" else str(num_bytes).encode()
    headers = [(b"content-length", str(len(reply)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": reply})


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    """Run the application under uvicorn, in a thread, as api/serve.py does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(application, http=Protocol, ws="none", log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        yield listener.getsockname()
        server.should_exit = True
        thread.join()


def talk(address: tuple[str, int], sent: bytes) -> bytes:
    """Send bytes and return all that the server answers until it closes."""
    with socket.create_connection(address, timeout=30) as connection:
        with contextlib.suppress(OSError):  # it may close before it has read all
            connection.sendall(sent)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(65536):
                answer += data
        return answer


POST = b"POST /first HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
UNREAD = b"POST /unread HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 99999999\r\n\r\n"
REFUSED = {
    "both lengths": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths, reversed": POST + b"Transfer-Encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "list of lengths": POST + b"Content-Length: 5, 5\r\n\r\nabcde",
    "equal lengths": POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nabcde",
    "different lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    "signed length": POST + b"Content-Length: +5\r\n\r\nabcde",
    "empty length": POST + b"Content-Length:\r\n\r\nabcde",
    "hexadecimal length": POST + b"Content-Length: 0x5\r\n\r\nabcde",
    "length with underscore": POST + b"Content-Length: 1_0\r\n\r\nabcdefghij",
    "fractional length": POST + b"Content-Length: 5.0\r\n\r\nabcde",
    "space before the colon": POST + b"Content-Length : 5\r\n\r\nabcde",
    "chunked twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "chunked in two headers": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "identity": POST + b"Transfer-Encoding: identity\r\nContent-Length: 5\r\n\r\nabcde",
    "identity alone": POST + b"Transfer-Encoding: identity\r\n\r\n",
    "unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "gzip": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "vertical tab": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "quoted coding": POST + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "chunked in HTTP/1.0": CHUNKED.replace(b"/1.1", b"/1.0") + b"0\r\n\r\n",
    "bare LF": POST.replace(b"\r\n", b"\n") + b"\n",
    "bare LF in one line": POST + b"X: 1\nContent-Length: 5\r\n\r\nabcde",
    "bare LF at the end": POST + b"Content-Length: 0\r\n\n",
    "LF LF": POST[:-2] + b"\n\n",
    "bare CR": POST + b"X: 1\rContent-Length: 5\r\n\r\nabcde",
    "empty first line": b"\r\n" + POST + b"\r\n",
    "LF as first line": b"\n" + POST + b"\r\n",
    "continuation line": POST + b"X: 1\r\n Content-Length: 5\r\n\r\nabcde",
    "continuation by a tab": POST + b"Transfer-Encoding:\r\n\tchunked\r\n\r\n0\r\n\r\n",
    "continuation of the request line": b"POST /first HTTP/1.1\r\n Host: localhost\r\n\r\n",
    "NUL": POST + b"X: a\0b\r\n\r\n",
    "control character": POST + b"X: a\x01b\r\n\r\n",
    "escape character": POST + b"X: \x1b[2J\r\n\r\n",
    "delete character": POST + b"X: a\x7f\r\n\r\n",
    "NUL in the name": POST + b"X\0: a\r\n\r\n",
    "no colon": POST + b"Content-Length\r\n\r\n",
    "empty name": POST + b": 5\r\n\r\n",
    "two hosts": POST + b"Host: other\r\n\r\n",
    "no host": b"POST /first HTTP/1.1\r\n\r\n",
    "absolute form": b"GET http://other/first HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "absolute form of this host": b"GET http://localhost/first HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no path": b"GET first HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "asterisk": b"GET * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "authority form": b"CONNECT other:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "HTTP/0.9": b"GET /first\r\n\r\n",
    "HTTP/1.2": POST.replace(b"/1.1", b"/1.2") + b"\r\n",
    "HTTP/2.0": POST.replace(b"/1.1", b"/2.0") + b"\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "lower-case version": POST.replace(b"HTTP", b"http") + b"\r\n",
    "two spaces": POST.replace(b" /first", b"  /first") + b"\r\n",
    "tab": POST.replace(b" /first", b"\t/first") + b"\r\n",
    "TLS": b"\x16\x03\x01\x02\0\x01\0",
    "chunk of minus one": CHUNKED + b"-1\r\n",
    "chunk of 0x5": CHUNKED + b"0x5\r\nabcde\r\n0\r\n\r\n",
    "chunk of many digits": CHUNKED + b"0" * 17 + b"5\r\nabcde\r\n0\r\n\r\n",
    "space after the size": CHUNKED + b"5 \r\nabcde\r\n0\r\n\r\n",
    "bare LF after the size": CHUNKED + b"5\nabcde\r\n0\r\n\r\n",
    "bare LF after the chunk": CHUNKED + b"5\r\nabcde\n0\r\n\r\n",
    "bare CR in an extension": CHUNKED + b"5;a\rb\r\nabcde\r\n0\r\n\r\n",
    "bare LF in an extension": CHUNKED + b"5;a\nb\r\nabcde\r\n0\r\n\r\n",
    "long extension": CHUNKED + b"5;" + b"a" * 300 + b"\r\nabcde\r\n0\r\n\r\n",
    "endless extension": CHUNKED + b"5;" + b"a" * 2**20,
    "bare LF in trailers": CHUNKED + b"0\r\nX: 1\n\r\n",
    "lengths in trailers": CHUNKED + b"0\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
    "endless trailers": CHUNKED + b"0\r\n" + b"X: 1\r\n" * 2**16,
    "many headers": POST + b"X: 1\r\n" * MAX_HEADERS + b"\r\n",
    "long header": POST + b"X: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n",
    "header of 1 MB": POST + b"X: " + b"a" * 2**20 + b"\r\n\r\n",
    "path of 1 MB": b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tiny chunks": CHUNKED + b"1\r\na\r\n" * (FREE_CHUNKS + 100),
}
SECOND = b"GET /second HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("name", REFUSED)
def test_an_ambiguous_request_is_refused_once_and_nothing_follows(name: str, address: tuple[str, int]):
    paths.clear()
    with httpx.Client(base_url=f"http://{address[0]}:{address[1]}", trust_env=False) as other:
        answer = talk(address, REFUSED[name] + SECOND + SECOND)
        assert other.post("/other", content=b"body").text == "4"
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close\r\n" in answer.lower()
    assert "/second" not in paths


def test_a_kept_connection_gets_a_400_for_its_second_request(address: tuple[str, int]):
    answer = talk(address, SECOND + REFUSED["both lengths"] + SECOND)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"400"]
    assert b"Content-Length and Transfer-Encoding exclude each other." in answer


def test_a_body_that_breaks_off_after_its_reply_is_not_answered_twice(address: tuple[str, int]):
    for rest in (b"zz\r\n", b"5;a\rb\r\n", b"0\r\nX: 1\n\r\n"):
        answer = talk(address, CHUNKED.replace(b"/first", b"/unread") + b"1\r\na\r\n" + rest + SECOND)
        assert answer.count(b"HTTP/1.1 ") <= 1


@pytest.mark.parametrize("name", ["refused", "unread"])
def test_a_client_that_is_still_sending_reads_the_whole_reply(name: str, address: tuple[str, int]):
    """The kernel answers bytes for a closed socket with a reset, and drops what the client has not read."""
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(UNREAD if name == "unread" else REFUSED["both lengths"])
        assert connection.recv(1, socket.MSG_PEEK) == b"H"  # the server has answered
        for _ in range(3):
            time.sleep(0.05)  # in which a reset would come
            connection.sendall(b"a" * 2**20)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))

    status, body = (b"200", b"0") if name == "unread" else (b"400", b"exclude each other.")
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert answer.endswith(body)


@pytest.mark.anyio
async def test_a_connection_that_its_client_has_reset_is_closed():
    """The socket then has no end to send, and says so."""
    transport = Mock(asyncio.Transport)
    transport.is_closing.return_value = False
    transport.write_eof.side_effect = OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    LingeringTransport(transport, lambda: True, asyncio.get_running_loop()).close()

    transport.close.assert_called_once_with()


def test_a_client_that_never_ends_its_body_is_closed(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "LINGER_S", 0.2)
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(UNREAD)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            drip(connection)


def drip(connection: socket.socket) -> None:
    """Send a little at a time until the server closes the connection."""
    while True:
        connection.sendall(b"a" * 1000)
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("sent", "num_bytes"),
    [
        (POST + b"Content-Length: 5\r\n\r\nabcde", b"5"),
        (POST + b"content-length:5\r\n\r\nabcde", b"5"),
        (CHUNKED + b"5\r\nabcde\r\n1;name=value\r\nf\r\n0\r\nTrailer: 1\r\n\r\n", b"6"),
        (CHUNKED + b"1\r\na\r\n" * 9000 + b"0\r\n\r\n", b"9000"),
        (POST + b"X: caf\xc3\xa9\tb\r\n" * (MAX_HEADERS - 2) + b"\r\n", b"0"),
        (POST.replace(b"/1.1", b"/1.0") + b"Content-Length: 5\r\n\r\nabcde", b"5"),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", b"0"),
    ],
)
def test_clear_requests_are_answered(sent: bytes, num_bytes: bytes, address: tuple[str, int]):
    answer = talk(address, sent.replace(b"Host: localhost", b"Connection: close\r\nHost: localhost", 1))
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    assert answer.endswith(b"\r\n\r\n" + num_bytes)


@pytest.mark.parametrize("name", ["nothing", "half a head", "kept connection", "body that nobody reads"])
def test_a_head_that_does_not_come_is_waited_for_a_bounded_time(
    name: str, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
):
    """A client sends a byte from time to time. 50 such connections delay no other client."""
    begin = {
        "nothing": b"",
        "half a head": POST,
        "kept connection": SECOND + b"GET",
        "body that nobody reads": b"POST /unread HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000\r\n\r\n",
    }[name]
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.5)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(50)]
        for connection in connections:
            connection.sendall(begin)
        other = stack.enter_context(httpx.Client(base_url=f"http://{address[0]}:{address[1]}", trust_env=False))
        open_, deadline, num_answered = set(connections), time.monotonic() + 120, 0
        while open_ and time.monotonic() < deadline:
            num_answered += other.get("/other").status_code == 200
            for connection in list(open_):
                if is_closed(connection, b"x" if begin else b""):
                    open_.discard(connection)
            time.sleep(0.05)
    assert not open_
    assert num_answered >= 2


def test_a_reply_is_not_kept_for_clients_that_do_not_read_it(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch):
    """One that reads slowly and steadily gets all of it meanwhile."""
    monkeypatch.setattr(protocol, "READ_TIMEOUT_S", 2.0)
    request = SECOND.replace(b"/second", b"/large").replace(b"Host", b"Connection: close\r\nHost")
    with contextlib.ExitStack() as stack:
        stalled = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(5)]
        steady = stack.enter_context(socket.create_connection(address, timeout=30))
        for connection in [*stalled, steady]:
            connection.sendall(request)
        num_read = 0
        while data := steady.recv(2**20):
            num_read += len(data)
            time.sleep(0.05 if num_read < LARGE // 2 else 0)
        time.sleep(3.0)
        for connection in stalled:
            assert 0 < num_bytes_until_reset(connection) < LARGE
    assert num_read > LARGE


def num_bytes_until_reset(connection: socket.socket) -> int:
    """Return how many bytes were sent before the server gave up."""
    num_bytes = 0
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(2**20):
            num_bytes += len(data)
    return num_bytes


def is_closed(connection: socket.socket, drip: bytes) -> bool:
    """Send `drip` and read what has come; True if the server has closed the connection."""
    connection.setblocking(False)
    try:
        connection.send(drip)
        while data := connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return data == b""
