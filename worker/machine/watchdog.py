"""End a process in which an operation hangs, in the one way that also ends a hang in the GPU's driver.

The heartbeats of such a process go on and keep its leases, so no other worker could run its jobs. The clock stops while
the Mac sleeps: an operation that slept does not hang.
"""

import os
from collections.abc import Callable, Mapping
from logging import Logger

from scorepool.store.clock import awake_s

STALLED = 70  # exit status, as sysexits.h's EX_SOFTWARE
WatchedOperations = Mapping[str, float | None]  # when each began (awake_s()), None while it does not run


class Watchdog:
    def __init__(
        self,
        timeout_s: float,
        watched_operations: Callable[[], WatchedOperations],
        report_death: Callable[[], None],
        log: Logger,
    ) -> None:
        self.timeout_s = timeout_s
        self._watched_operations = watched_operations
        self._report_death = report_death
        self._log = log

    def check(self) -> None:
        """End the process if an operation takes too long. Call it more often than every `timeout_s`."""
        for what, since in self._watched_operations().items():
            if since is not None and awake_s() - since > self.timeout_s:
                self._log.critical(
                    "%s has run longer than %g s (SCOREPOOL_STALL_TIMEOUT_S), so this process ends; its leases bring "
                    "its jobs back",
                    what,
                    self.timeout_s,
                )
                self._report_death()
                os._exit(STALLED)
