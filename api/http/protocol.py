"""Refuse requests that HTTP servers read differently, and answer each refused request once.

h11 is lenient where a proxy in front may not be: it takes a bare LF for a line's end, joins continuation lines, drops
the second of two equal Content-Lengths, and prefers Transfer-Encoding to Content-Length. What one of the two takes for
a body, the other takes for the next request, which then is another client's. All of these get 400 here, and the
connection is closed.

What a client can hold open is bounded too: the bytes and lines of a head, the time until it has come, the number of
chunks of a body, and the time for which a reply is kept for a client that does not read it.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Any, NoReturn

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 20.0  # from the connection, or from the end of the last response, to the end of the next head
READ_TIMEOUT_S = 20.0  # in which a client that is slow to read must take READ_BYTES_PER_S
READ_BYTES_PER_S = 4 * 1024
LINGER_S = 10.0  # for which the rest of a body is dropped before its connection is closed
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100
MAX_CHUNK_LINE_BYTES = 256
FREE_CHUNKS = 10_000  # of any size; h11 takes some 10 µs for each
MIN_CHUNK_BYTES = 256  # on average, of the chunks beyond

_END = re.compile(rb"\n\r?\n")  # what h11 takes for the end of a head
_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n)")
_FOLD = re.compile(rb"\r\n[ \t]")
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(;[\t -~\x80-\xff]*)?\r\n")


class Protocol(H11Protocol):
    """A connection of uvicorn's with a stricter parser, and with a limit on the time that a head takes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = self._strict = StrictConnection()
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(LingeringTransport(transport, self._is_amid_request, self.loop))  # type: ignore[arg-type]
        self._limit_head()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._limit_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_read_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_read_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that breaks the protocol, unless its response has begun; close the connection.

        uvicorn's own method fails with a traceback if the application has begun to answer, or begins just afterwards.
        """
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        super().send_400_response(f"{msg} {self._strict.refusal}".rstrip())
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _is_amid_request(self) -> bool:
        """Tell whether the client has begun a request and may still be sending it."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def _limit_head(self) -> None:
        """Run the timer while the client has a head to send, or the rest of a body that nobody reads."""
        if self.conn.their_state is not h11.IDLE and self.conn.our_state is not h11.DONE:
            self._stop_head_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _limit_reading(self) -> None:
        """Close the connection unless its client takes enough of the reply that waits for it, again and again."""
        num_unsent = self.transport.get_write_buffer_size()

        def check() -> None:
            if num_unsent - self.transport.get_write_buffer_size() < READ_TIMEOUT_S * READ_BYTES_PER_S:
                self.transport.abort()  # `close` would wait until the client has read the rest
            else:
                self._limit_reading()

        self._read_timer = self.loop.call_later(READ_TIMEOUT_S, check)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class LingeringTransport:
    """A transport that ends its connection without a reset for a client that is still sending.

    Args:
        transport: The connection.
        is_amid_request: Tells whether more of a request may come.
        loop: The event loop of the transport.
    """

    def __init__(
        self, transport: asyncio.Transport, is_amid_request: Callable[[], bool], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._transport = transport
        self._is_amid_request = is_amid_request
        self._loop = loop
        self._is_lingering = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._is_lingering or self._transport.is_closing()

    def close(self) -> None:
        """Send what is buffered, then close: now, or when the client has closed, at most LINGER_S later."""
        if self.is_closing() or not self._is_amid_request() or not self._transport.can_write_eof():
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:  # the client has reset the connection
            self._transport.close()
            return
        self._is_lingering = True
        self._transport.resume_reading()
        self._loop.call_later(LINGER_S, self._transport.close)


class StrictConnection(h11.Connection):
    """Raise h11.RemoteProtocolError at what h11 tolerates. `refusal` then says what was wrong."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._receive_buffer = StrictBuffer()
        self._own_refusal = ""

    @property
    def refusal(self) -> str:
        """The sentence for the client; empty if h11 found the fault."""
        assert isinstance(self._receive_buffer, StrictBuffer)
        return self._own_refusal or self._receive_buffer.refusal

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and (refusal := refusal_of_request(event)):
            self._own_refusal = refusal
            raise h11.RemoteProtocolError(refusal)
        return event


def refusal_of_request(request: h11.Request) -> str:
    """Say what is wrong with the request line, or with its version's framing; empty if nothing is."""
    if request.http_version not in (b"1.0", b"1.1"):
        return "The version is not HTTP/1.0 or HTTP/1.1."
    if not request.target.startswith(b"/") and (request.method, request.target) != (b"OPTIONS", b"*"):
        return "The request line must have the path alone, because this server is no proxy."
    if request.http_version == b"1.0" and any(name == b"transfer-encoding" for name, _ in request.headers):
        return "HTTP/1.0 has no Transfer-Encoding."
    return ""


class StrictBuffer(ReceiveBuffer):
    """The bytes that have arrived. It hands on heads and lines of chunks that every server reads in the same way."""

    def __init__(self) -> None:
        super().__init__()
        self.refusal = ""
        self._num_chunks = 0  # of the body
        self._chunk_bytes = 0

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Extract a head, or the trailers of a body. Raises h11.LocalProtocolError."""
        end = _END.search(self._data, self._multiple_lines_search)
        head = bytes(self._data[: end.end() if end else 0])
        if refusal := refusal_of_head(head):
            self._refuse(refusal)
        self._num_chunks = self._chunk_bytes = 0
        return super().maybe_extract_lines()

    def maybe_extract_next_line(self) -> bytearray | None:
        """Extract the line before a chunk. Raises h11.LocalProtocolError."""
        line = super().maybe_extract_next_line()
        if len(self if line is None else line) > MAX_CHUNK_LINE_BYTES:
            self._refuse(f"The line before a chunk is longer than {MAX_CHUNK_LINE_BYTES} bytes.")
        if line is None:
            return None
        match = _CHUNK_LINE.fullmatch(line)
        if match is None:
            self._refuse("The line before a chunk must be its size in hexadecimal digits.")
        self._num_chunks += 1
        self._chunk_bytes += int(match[1], 16)
        if self._num_chunks > FREE_CHUNKS + self._chunk_bytes // MIN_CHUNK_BYTES:
            self._refuse(f"The body has more than {FREE_CHUNKS} chunks of less than {MIN_CHUNK_BYTES} bytes.")
        return line

    def _refuse(self, refusal: str) -> NoReturn:
        self.refusal = refusal
        raise h11.LocalProtocolError(refusal)


def refusal_of_head(head: bytes) -> str:
    """Say what is wrong with a head or with trailers, up to the empty line; empty if nothing is."""
    if len(head) > MAX_HEAD_BYTES:
        return f"The headers are longer than {MAX_HEAD_BYTES} bytes."
    if _BARE.search(head):
        return "Lines must end with CR LF."
    if _FOLD.search(head):
        return "A header must have one line."
    if _CONTROL.search(head):
        return "A header has a control character."
    lines = head.split(b"\r\n")
    if len(lines) > MAX_HEADERS + 3:  # the request line, and two empty ones
        return f"There are more than {MAX_HEADERS} headers."
    names = [line.partition(b":")[0].lower() for line in lines]
    lengths = [
        line.partition(b":")[2].strip() for line, name in zip(lines, names, strict=True) if name == b"content-length"
    ]
    if len(lengths) > 1 or not all(length.isdigit() for length in lengths):
        return "Content-Length must be one number."
    if lengths and b"transfer-encoding" in names:
        return "Content-Length and Transfer-Encoding exclude each other."
    return ""
