"""Log what fails again and again until Redis is back: at once, once a minute while it lasts, and its end."""

import logging

from scorepool.store.clock import clock_s

EVERY_S = 60.0  # between two lines about one outage


class Outage:
    """What one caller knows of an outage. Used by one thread or task.

    `failed` is called with each failure, `ended` with each success.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._since_s: float | None = None  # clock_s(); None: the last attempt succeeded
        self._logged_at_s = 0.0

    def failed(self, message: str, *args: object, level: int = logging.WARNING) -> None:
        """Log a failure, unless one of this outage was logged less than EVERY_S ago."""
        now_s = clock_s()
        if self._since_s is None:
            self._since_s = now_s
        elif now_s - self._logged_at_s < EVERY_S:
            return
        self._logged_at_s = now_s
        self._log.log(level, message, *args)

    def ended(self, message: str) -> None:
        """Log the end of the outage, if there is one, with its length."""
        if self._since_s is not None:
            self._log.info("%s after %.0f s", message, clock_s() - self._since_s)
            self._since_s = None
