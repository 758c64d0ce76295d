"""Connections to receivers, kept for a while: who is told often is not looked up and greeted anew for each delivery."""

import time
from dataclasses import dataclass
from threading import Lock

import httpcore

from scorepool.worker.webhooks.ssrf_guard import SsrfGuard

IDLE_S = 15.0  # for which an idle one is kept
AGE_S = 60.0  # after which its receiver's name is looked up, and the addresses are checked, again


@dataclass(eq=False, slots=True)
class Connection:
    """To one origin. It connects when it is first used."""

    origin: tuple[str, str, int]  # scheme, host, port
    http: httpcore.HTTPConnection
    guard: SsrfGuard
    opened_at: float  # time.monotonic()
    idle_since: float

    def is_usable(self, now: float) -> bool:
        is_young = now - self.idle_since < IDLE_S and now - self.opened_at < AGE_S
        return is_young and self.http.is_idle() and not self.http.has_expired() and not self._has_said_more()

    def _has_said_more(self) -> bool:
        """Whether what came with the last answer goes on behind its end: it would be taken for the next one's."""
        inner = self.http._connection
        return isinstance(inner, httpcore.HTTP11Connection) and bool(inner._h11_state.trailing_data[0])


class Connections:
    """Thread-safe. A connection that is out belongs to its borrower alone."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._idle: dict[tuple[str, str, int], list[Connection]] = {}

    def take(self, origin: tuple[str, str, int]) -> Connection | None:
        """The one that was used last, if any still stands. It may yet turn out that the receiver hangs up."""
        while True:
            with self._lock:
                idle = self._idle.get(origin)
                if not idle:
                    return None
                connection = idle.pop()
            if connection.is_usable(time.monotonic()):
                return connection
            connection.http.close()

    def give(self, connection: Connection) -> None:
        """After its use; it is closed if it cannot be used again."""
        connection.idle_since = time.monotonic()
        if not connection.is_usable(connection.idle_since):
            connection.http.close()
            return
        with self._lock:
            self._idle.setdefault(connection.origin, []).append(connection)

    def tidy(self) -> None:
        """Close what nobody took for too long. Due every IDLE_S."""
        now = time.monotonic()
        for connection in self._take_all():
            if connection.is_usable(now):
                with self._lock:
                    self._idle.setdefault(connection.origin, []).append(connection)
            else:
                connection.http.close()

    def close(self) -> None:
        for connection in self._take_all():
            connection.http.close()

    def _take_all(self) -> list[Connection]:
        with self._lock:
            every = [connection for idle in self._idle.values() for connection in idle]
            self._idle.clear()
        return every
