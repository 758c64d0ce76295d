"""Guard against server-side request forgery: connect only to checked addresses, within one deadline.

Webhooks are sent and images are fetched through it. It lies in `store/` beside the rules for URLs, because `api/` and
`worker/` may both import it from here only.

httpcore asks this network backend for connections. The backend resolves the name once, checks all of its addresses and
connects to one of them, so a name that resolves differently a moment later (DNS rebinding) has no effect. A connection
lasts for a minute at most, and the next one is checked in the same way. No proxy is used and no redirect is followed
(httpcore does neither by itself), and no unix socket is opened.
"""

import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import certifi
import httpcore

from scorepool.store.webhook_url import is_public

MAX_RECEIVED_BYTES = 128 * 1024  # in one exchange: also heads, of which a server may send any number (HTTP 1xx)
MAX_POLL_S = 1.0  # after which a deadline that was moved is seen

T = TypeVar("T")
Lookup = Callable[[str, int], "Future[list[str]]"]  # resolves a name on another thread


class BlockedAddress(httpcore.ConnectError):
    """The server's name has an address that is not public."""


def resolve(host: str, port: int) -> list[str]:
    """Return every address of the name, in the order to try them; raise OSError if there is none."""
    return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))


def tls_context() -> ssl.SSLContext:
    """Return a context that trusts the system's certificates (or those of SSL_CERT_FILE) and certifi's."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


class SsrfGuard(httpcore.NetworkBackend):
    """The network backend of one connection.

    `deadline` is a time.monotonic(): lookup, connect, TLS, write and read all end by then. `bytes_left` may be read
    until then. Set both again before a connection is reused. `lookup` runs on another thread because the system's
    resolver has no timeout.
    """

    def __init__(
        self, deadline: float, lookup: Lookup, allow_private: bool, max_bytes: int = MAX_RECEIVED_BYTES
    ) -> None:
        self.deadline = deadline
        self.bytes_left = max_bytes
        self._lookup = lookup
        self._allow_private = allow_private

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Resolve, check and connect; raise BlockedAddress, httpcore.ConnectError or httpcore.ConnectTimeout."""
        addresses = self._resolve(host, port)
        private = [address for address in addresses if not is_public(address)]
        if private and not self._allow_private:
            raise BlockedAddress(f"{host} has the address {private[0]}, which is not public")
        return self._connect(addresses, port)

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        """Refuse: a URL names a host."""
        raise BlockedAddress("unix sockets are not opened")

    def _resolve(self, host: str, port: int) -> list[str]:
        lookup = self._lookup(host, port)
        try:
            return lookup.result(timeout=max(0.0, self.deadline - time.monotonic()))
        except TimeoutError:
            lookup.cancel()
            raise httpcore.ConnectTimeout(f"the lookup of {host} took too long") from None
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"cannot look up {host}: {error}") from error

    def _connect(self, addresses: Sequence[str], port: int) -> "DeadlineStream":
        """Connect to the first address that answers. Each one gets an equal share of the time that is left."""
        failure: Exception = httpcore.ConnectError("the name has no address")
        for num_left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            share_s = (self.deadline - time.monotonic()) / num_left
            if share_s <= 0:
                raise httpcore.ConnectTimeout("connecting took too long")
            try:
                return DeadlineStream(socket.create_connection((address, port), timeout=share_s), self)
            except TimeoutError:
                failure = httpcore.ConnectTimeout("connecting took too long")
            except OSError as error:
                failure = httpcore.ConnectError(error.strerror or str(error))
        raise failure


class DeadlineStream(httpcore.NetworkStream):
    """A socket on which every operation ends at the guard's deadline, however slowly the server sends."""

    def __init__(self, connection: socket.socket, guard: SsrfGuard) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._guard = guard

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._guard.bytes_left <= 0:
            raise httpcore.ReadError("the server sent too much")
        try:
            received = self._run(lambda: self._socket.recv(max_bytes), select.POLLIN)
        except TimeoutError as error:
            raise httpcore.ReadTimeout(str(error)) from None
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error
        self._guard.bytes_left -= len(received)
        return received

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            while buffer:
                rest = buffer
                buffer = buffer[self._run(lambda: self._socket.send(rest), select.POLLOUT) :]  # noqa: B023 - called before `rest` changes
        except TimeoutError as error:
            raise httpcore.WriteTimeout(str(error)) from None
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        try:
            secure = ssl_context.wrap_socket(
                self._socket, server_hostname=server_hostname, do_handshake_on_connect=False
            )
            self._socket = secure
            self._run(secure.do_handshake, select.POLLIN)
        except TimeoutError as error:
            self.close()
            raise httpcore.ConnectTimeout(str(error)) from None
        except OSError as error:
            self.close()
            raise httpcore.ConnectError(f"TLS: {error}") from error
        return self

    def close(self) -> None:
        self._socket.close()

    def get_extra_info(self, info: str) -> Any:
        """Answer the two questions of httpcore.

        `ssl_object` tells it which HTTP version was negotiated. `is_readable` is true for an idle connection that the
        server closed, or on which it sent data without a request.
        """
        if info == "is_readable":
            return self._poll(select.POLLIN, 0)
        return self._socket if info == "ssl_object" and isinstance(self._socket, ssl.SSLSocket) else None

    def _run(self, operation: Callable[[], T], event: int) -> T:
        """Repeat a non-blocking operation until it succeeds; raise TimeoutError at the deadline."""
        while True:
            if time.monotonic() >= self._guard.deadline:
                raise TimeoutError("the server took too long")
            try:
                return operation()
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)
            except BlockingIOError:
                self._wait(event)

    def _wait(self, event: int) -> None:
        self._poll(event, min(MAX_POLL_S, max(0.0, self._guard.deadline - time.monotonic())) * 1000)

    def _poll(self, event: int, timeout_ms: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(timeout_ms))
