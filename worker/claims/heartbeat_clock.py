"""Tell whether a worker's heartbeats are on time.

Late heartbeats mean that Redis, this process or the whole machine stood still. Other workers may have stood still as
well, so nobody's jobs are taken before all have had time to extend their leases.
"""

import math
from collections.abc import Callable

from scorepool.store.clock import clock_s


class HeartbeatClock:
    """The times of a worker's heartbeats. Thread-safe, because each field is written by one statement."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._last_at = math.inf  # clock_s() of the last heartbeat
        self._on_time_since = -math.inf  # clock_s(): no heartbeat was late since

    def record(self) -> None:
        """Note that a heartbeat was sent."""
        if clock_s() - self._last_at > self._lease_s / 2:
            self._on_time_since = clock_s()
        self._last_at = clock_s()

    def heard_since(self, at: float) -> bool:
        """True if a heartbeat was sent after a time (clock_s())."""
        return at < self._last_at < math.inf

    def is_on_time(self, ping: Callable[[], object]) -> bool:
        """True if no heartbeat was late for the length of a lease, and Redis answers a ping at once.

        Redis runs a command that was sent during a stall when the stall is over. The ping keeps a reclaim from
        being that command.
        """
        if clock_s() - self._last_at >= self._lease_s / 2 or clock_s() - self._on_time_since <= self._lease_s:
            return False
        sent_at = clock_s()
        ping()
        if clock_s() - sent_at > self._lease_s / 4:
            self._on_time_since = clock_s()
            return False
        return True
