"""How a webhook's connection is made: to an address that was checked, within one time limit, and to nothing else.

httpcore asks this backend for connections. The name is resolved once, all its addresses are checked, and the
connection goes to one of these very addresses, so a name that resolves differently a moment later gains nothing: not
while the connection lasts (connection_pool.py keeps it for a minute), and the next one is checked like this one. No
proxy is used, no redirect is followed (httpcore knows neither by itself), no unix socket is opened.
"""

import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import httpcore

from scorepool.store import is_public

Answer = TypeVar("Answer")
Lookup = Callable[[str, int], "Future[list[str]]"]  # a name's addresses, found on another thread: see Guard


class Blocked(httpcore.ConnectError):
    """The name has an address that is not public."""


def addresses(host: str, port: int) -> list[str]:
    """Every address of the name, those to try first in front. Raises OSError."""
    return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))


class SsrfGuard(httpcore.NetworkBackend):
    """For one connection. `deadline` is a time.monotonic(): all of lookup, connect, TLS, write and read end by then.
    Whoever uses the connection again sets another.

    `lookup` runs elsewhere because the system's resolver takes no time limit.
    """

    def __init__(self, deadline: float, lookup: Lookup, allow_private: bool) -> None:
        self.deadline = deadline
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
        """Raises Blocked, httpcore.ConnectError, httpcore.ConnectTimeout."""
        found = self._resolve(host, port)
        private = [address for address in found if not is_public(address)]
        if private and not self._allow_private:
            raise Blocked(f"{host} has the address {private[0]}, which is not public")
        return self._connect(found, port)

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        raise Blocked("webhooks go to no unix socket")

    def _resolve(self, host: str, port: int) -> list[str]:
        lookup = self._lookup(host, port)
        try:
            return lookup.result(timeout=max(0.0, self.deadline - time.monotonic()))
        except TimeoutError:
            lookup.cancel()
            raise httpcore.ConnectTimeout(f"looking up {host} took too long") from None
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"cannot look up {host}: {error}") from error

    def _connect(self, found: Sequence[str], port: int) -> "Stream":
        """To the first address that answers; the time left is shared among those not tried yet."""
        failure: Exception = httpcore.ConnectError("the name has no address")
        for num_left, address in zip(range(len(found), 0, -1), found, strict=True):
            share_s = (self.deadline - time.monotonic()) / num_left
            if share_s <= 0:
                raise httpcore.ConnectTimeout("connecting took too long")
            try:
                return Stream(socket.create_connection((address, port), timeout=share_s), self)
            except TimeoutError:
                failure = httpcore.ConnectTimeout("connecting took too long")
            except OSError as error:
                failure = httpcore.ConnectError(error.strerror or str(error))
        raise failure


class Stream(httpcore.NetworkStream):
    """A socket whose every wait ends at its guard's deadline, however slowly the other side drips."""

    def __init__(self, connection: socket.socket, guard: SsrfGuard) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._guard = guard

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            return self._run(lambda: self._socket.recv(max_bytes), select.POLLIN)
        except TimeoutError as error:
            raise httpcore.ReadTimeout(str(error)) from None
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            while buffer:
                rest = buffer
                buffer = buffer[self._run(lambda: self._socket.send(rest), select.POLLOUT) :]  # noqa: B023 - runs at once
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
        """httpcore asks for `ssl_object`, to learn which HTTP was agreed on, and whether an idle connection
        `is_readable`: then the receiver has hung up, or says what nobody asked for."""
        if info == "is_readable":
            return self._poll(select.POLLIN, 0)
        return self._socket if info == "ssl_object" and isinstance(self._socket, ssl.SSLSocket) else None

    def _run(self, action: Callable[[], Answer], event: int) -> Answer:
        """Repeat until the socket lets it through. Raises TimeoutError at the deadline."""
        while True:
            if time.monotonic() >= self._guard.deadline:
                raise TimeoutError("the receiver took too long")
            try:
                return action()
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)
            except BlockingIOError:
                self._wait(event)

    def _wait(self, event: int) -> None:
        self._poll(event, max(0.0, self._guard.deadline - time.monotonic()) * 1000)

    def _poll(self, event: int, patience_ms: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(patience_ms))
