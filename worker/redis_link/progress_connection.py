"""Connections to Redis whose timeouts are per progress: one is given up when nothing has moved for `socket_timeout`.

redis-py limits the sending of a whole message by `socket_timeout`, and then the wait for its reply. On a slow link a
large message exceeds both, however steadily it moves. Here a message is sent in pieces, each with the full timeout.
Bytes that the kernel has taken and not sent count as well: a reply is overdue only when the send buffer has not shrunk
for the timeout. (A read has the timeout for each `recv`, in redis-py too.)

A connection that is given up drops what it has not sent. Otherwise the kernel would go on sending it, in front of the
message that is sent again on the next connection.
"""

import fcntl
import socket
import struct
import sys
import termios
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import redis.connection
import redis.sentinel
from redis.connection import AbstractConnection
from redis.exceptions import TimeoutError as RedisTimeoutError

PIECE_BYTES = 16 * 1024  # leaves within the timeout on any link that can be worked with
UNSENT_BYTES = 128 * 1024  # most that the kernel takes ahead of what it sends; a socket's buffer holds 4 MB and more
MAX_PATIENCE_S = 10.0  # for a message that took long
DEAD_AFTER_S = 20  # a silent peer: nothing arrives, not even the answer to a probe
_SO_NWRITE = 0x1024  # macOS: bytes in the send buffer
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_TCP_OPTIONS = {
    getattr(socket, name): value
    for name, value in (
        ("TCP_KEEPIDLE", DEAD_AFTER_S // 4),
        ("TCP_KEEPALIVE", DEAD_AFTER_S // 4),  # macOS's name for it
        ("TCP_KEEPINTVL", DEAD_AFTER_S // 4),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", DEAD_AFTER_S * 1000),  # Linux sends no probes while data is not acknowledged
    )
    if hasattr(socket, name)
}
_TCP_OPTIONS[0x201 if sys.platform == "darwin" else 25] = UNSENT_BYTES  # TCP_NOTSENT_LOWAT

_timeout_s: ContextVar[float | None] = ContextVar("timeout_s", default=None)


@contextmanager
def socket_timeout(timeout_s: float) -> Iterator[None]:
    """Use another timeout for what this thread sends and connects inside the context."""
    token = _timeout_s.set(timeout_s)
    try:
        yield
    finally:
        _timeout_s.reset(token)


class _ProgressConnection(AbstractConnection):
    """The part that all kinds of connections share."""

    _is_sending = False  # the kernel may hold bytes of a message of several pieces
    _sent_at = 0.0  # time.monotonic(), when the last message began

    @property
    def socket_timeout(self) -> float | None:
        """The timeout (s) of this thread's context, or the connection's own."""
        timeout_s = _timeout_s.get()
        return self._socket_timeout if timeout_s is None else timeout_s

    @socket_timeout.setter
    def socket_timeout(self, value: float | None) -> None:
        self._socket_timeout = value

    @property
    def socket_connect_timeout(self) -> float | None:
        """The timeout (s) of this thread's context, or the connection's own."""
        timeout_s = _timeout_s.get()
        return self._socket_connect_timeout if timeout_s is None else timeout_s

    @socket_connect_timeout.setter
    def socket_connect_timeout(self, value: float | None) -> None:
        self._socket_connect_timeout = value

    def _connect(self) -> socket.socket:
        sock: socket.socket = super()._connect()  # type: ignore[safe-super]
        if sock.family != socket.AF_UNIX:
            for name, value in _TCP_OPTIONS.items():
                sock.setsockopt(socket.IPPROTO_TCP, name, value)
        return sock

    def send_packed_command(self, command: Iterable[Any], check_health: bool = True) -> None:
        if self._sock is not None:
            self._sock.settimeout(self.socket_timeout)
        pieces = list(_pieces(command))
        self._sent_at = time.monotonic()
        super().send_packed_command(pieces, check_health)
        self._is_sending = len(pieces) > 1

    def read_response(self, disable_decoding: bool = False, **options: Any) -> Any:
        if self._is_sending and "timeout" not in options:
            self._wait_while_sending(options.get("disconnect_on_error", True))
        return super().read_response(disable_decoding, **options)

    def disconnect(self, *args: Any, **kwargs: Any) -> None:
        if self._sock is not None and _num_unsent(self._sock):
            with suppress(OSError):  # the peer has closed it
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        super().disconnect(*args, **kwargs)

    def _wait_while_sending(self, disconnect_on_error: bool) -> None:
        """Wait until the last message has left or a reply arrives. Raise redis's TimeoutError if nothing leaves.

        A message that took long is given as long again, because buffers on the way empty as slowly.
        """
        sock, timeout_s = self._sock, self.socket_timeout
        if sock is None or timeout_s is None:
            return
        num_unsent, moved_at = _num_unsent(sock), time.monotonic()
        while num_unsent and not self.can_read(min(timeout_s / 4, 0.25)):
            left = _num_unsent(sock)
            if left < num_unsent:
                num_unsent, moved_at = left, time.monotonic()
            elif time.monotonic() - moved_at >= self._patience_s(timeout_s):
                if disconnect_on_error:
                    self.disconnect()
                raise RedisTimeoutError(f"Timeout writing to {self._host_error()}: {left} bytes are not acknowledged")
        self._is_sending = num_unsent > 0
        sock.settimeout(self._patience_s(timeout_s))

    def _patience_s(self, timeout_s: float) -> float:
        return max(timeout_s, min(time.monotonic() - self._sent_at, MAX_PATIENCE_S))


class Connection(_ProgressConnection, redis.connection.Connection):
    """TCP."""


class SSLConnection(_ProgressConnection, redis.connection.SSLConnection):
    """TLS."""


class UnixDomainSocketConnection(_ProgressConnection, redis.connection.UnixDomainSocketConnection):
    """A unix socket."""


class SentinelManagedConnection(_ProgressConnection, redis.sentinel.SentinelManagedConnection):
    """TCP, to the master that Sentinel names."""


class SentinelManagedSSLConnection(_ProgressConnection, redis.sentinel.SentinelManagedSSLConnection):
    """TLS, to the master that Sentinel names."""


def _pieces(command: Iterable[Any]) -> Iterator[Any]:
    for item in command:
        view = memoryview(item)
        for at in range(0, len(view), PIECE_BYTES):
            yield view[at : at + PIECE_BYTES]


def _num_unsent(sock: socket.socket) -> int:
    """Return how many bytes the kernel has taken and the peer has not acknowledged; 0 if it cannot tell."""
    try:
        if sys.platform == "darwin":
            return sock.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
        return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])
    except OSError:  # closed or reset
        return 0
