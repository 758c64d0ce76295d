"""The clocks that a process reads: two of its machine, and Redis's.

    clock_s()    goes on while the machine sleeps: leases, deadlines that others know, intervals of tasks
    awake_s()    stops while the machine sleeps: how long this process has worked on something
    RedisClock   the unix time of every time that is shown or kept in Redis: the clocks of the machines differ

The first two agree while the machine is awake; a test replaces both through `time` here. A wait of a thread
(`Event.wait`, `Queue.get`, `time.sleep`) stands still during sleep, so a loop that waits for a time of `clock_s`
waits a second at most and looks again.
"""

import math
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from redis import Redis

# On Linux CLOCK_MONOTONIC stops during sleep and CLOCK_BOOTTIME goes on; macOS has no CLOCK_BOOTTIME, and its
# CLOCK_MONOTONIC goes on.
_GOES_ON = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
MAX_DRIFT = 1e-4  # s per s between the clocks of two machines; those of quartz drift by half of it


def clock_s() -> float:
    """Return a monotonic time, s, that goes on while the machine sleeps."""
    return time.clock_gettime(_GOES_ON)


def awake_s() -> float:
    """Return a monotonic time, s, that stops while the machine sleeps."""
    return time.monotonic()


@dataclass(frozen=True, slots=True)
class _Offset:
    """Redis's time minus `clock_s`, as it was at `measured_at`."""

    offset_s: float
    error_s: float
    measured_at: float  # clock_s()

    def error_at(self, at: float) -> float:
        return self.error_s + MAX_DRIFT * (at - self.measured_at)


class RedisClock:
    """Redis's clock as this process knows it. Before the first measurement it is that of this machine.

    Any thread and any signal handler may read it: a measurement replaces the offset in one statement.
    """

    def __init__(self) -> None:
        self._offset = _Offset(time.time() - clock_s(), math.inf, clock_s())

    def measure(self, connection: Redis, num_samples: int = 1) -> None:
        """Ask Redis for its time, and use the best of the answers. Raises RedisError."""
        for _ in range(num_samples):
            asked_at = clock_s()
            self.take(connection.time(), asked_at)

    def take(self, answer: tuple[int, int], asked_at: float) -> None:
        """Use an answer to TIME that has just arrived. `asked_at` is a clock_s().

        The answer was true at some moment between the question and its arrival, so of two measurements that agree the
        one of the shorter round trip is kept, until the drift of the clocks outweighs it. One that disagrees replaces
        it: Redis's clock was set, or another server answers.
        """
        seconds, microseconds = answer
        answered_at = clock_s()
        offset_s = seconds + microseconds / 1e6 - (asked_at + answered_at) / 2
        measured = _Offset(offset_s, (answered_at - asked_at) / 2, answered_at)
        known_error_s = self._offset.error_at(answered_at)
        agrees = abs(offset_s - self._offset.offset_s) <= measured.error_s + known_error_s
        if measured.error_s <= known_error_s or not agrees:
            self._offset = measured

    def now_s(self) -> float:
        """Return Redis's unix time, s."""
        return clock_s() + self._offset.offset_s

    def now(self) -> datetime:
        """Return Redis's time."""
        return datetime.fromtimestamp(self.now_s(), UTC)
