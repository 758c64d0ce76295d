"""Hosts that let every attempt time out. While one is silent, its deliveries do not hold everybody's threads."""

import time
from collections.abc import Callable
from threading import Lock

MAX_TIMEOUTS = 5  # in a row, after which a host counts as silent
PAUSE_S = 30.0  # between the attempts that are still made, to hear whether it is back
MAX_HOSTS = 10_000  # remembered; beyond that all are forgotten, which costs a few timeouts and no delivery


class Silence:
    """Thread-safe. It is one process's memory: nothing is lost with it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._timeouts: dict[str, tuple[int, float]] = {}  # host: how many in a row, when it was last tried

    def is_silent(self, host: str) -> bool:
        """False also for the one attempt in PAUSE_S that asks again."""
        with self._lock:
            num_timeouts, tried_at = self._timeouts.get(host, (0, 0.0))
            if num_timeouts < MAX_TIMEOUTS:
                return False
            if self._clock() - tried_at < PAUSE_S:
                return True
            self._timeouts[host] = (num_timeouts, self._clock())
            return False

    def timed_out(self, host: str) -> None:
        with self._lock:
            if host not in self._timeouts and len(self._timeouts) >= MAX_HOSTS:
                self._timeouts.clear()
            self._timeouts[host] = (self._timeouts.get(host, (0, 0.0))[0] + 1, self._clock())

    def heard(self, host: str) -> None:
        with self._lock:
            self._timeouts.pop(host, None)
