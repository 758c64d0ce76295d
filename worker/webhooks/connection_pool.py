"""Idle HTTP connections to receivers, kept for reuse: saves a name lookup and a TLS handshake per delivery."""

from dataclasses import dataclass
from threading import Lock

import httpcore

from scorepool.store.clock import clock_s
from scorepool.store.ssrf_guard import SsrfGuard

IDLE_TIMEOUT_S = 15.0  # an idle connection is closed after this time
MAX_AGE_S = 60.0  # then a new connection looks the name up and checks the addresses again

Origin = tuple[str, str, int]  # scheme, host, port


@dataclass(eq=False, slots=True)
class Connection:
    """A connection to one origin. It connects at its first request."""

    origin: Origin
    http: httpcore.HTTPConnection
    guard: SsrfGuard
    opened_at: float  # clock_s(): a connection does not outlive a sleep
    idle_since: float

    def is_usable(self, now: float) -> bool:
        """True if another request may be sent on the connection."""
        is_young = now - self.idle_since < IDLE_TIMEOUT_S and now - self.opened_at < MAX_AGE_S
        return is_young and self.http.is_idle() and not self.http.has_expired() and not self._has_unread_data()

    def _has_unread_data(self) -> bool:
        """True if data follows the last response: it would be read as the response to the next request."""
        inner = self.http._connection
        return isinstance(inner, httpcore.HTTP11Connection) and bool(inner._h11_state.trailing_data[0])


class ConnectionPool:
    """Idle connections by origin. Thread-safe; one caller at a time uses an acquired connection."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._idle: dict[Origin, list[Connection]] = {}

    def acquire(self, origin: Origin) -> Connection | None:
        """Return the usable connection that was released last, or None. The receiver may still close it."""
        while True:
            with self._lock:
                idle = self._idle.get(origin)
                if not idle:
                    return None
                connection = idle.pop()
            if connection.is_usable(clock_s()):
                return connection
            connection.http.close()

    def release(self, connection: Connection) -> None:
        """Put a connection back after its use, or close it if it cannot be used again."""
        connection.idle_since = clock_s()
        if not connection.is_usable(connection.idle_since):
            connection.http.close()
            return
        with self._lock:
            self._idle.setdefault(connection.origin, []).append(connection)

    def evict_idle(self) -> None:
        """Close the connections that were idle for too long. Call it every IDLE_TIMEOUT_S."""
        now = clock_s()
        for connection in self._remove_all():
            if connection.is_usable(now):
                with self._lock:
                    self._idle.setdefault(connection.origin, []).append(connection)
            else:
                connection.http.close()

    def close(self) -> None:
        """Close every idle connection."""
        for connection in self._remove_all():
            connection.http.close()

    def _remove_all(self) -> list[Connection]:
        with self._lock:
            connections = [connection for idle in self._idle.values() for connection in idle]
            self._idle.clear()
        return connections
