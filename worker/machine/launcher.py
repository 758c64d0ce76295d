"""Notice the end of `mlx.launch`, which does not end the ranks that it has started when a signal ends it."""

import os
import signal
from collections.abc import Callable
from logging import Logger


class Launcher:
    """The process that started this one."""

    def __init__(self, is_stopping: Callable[[], bool], log: Logger) -> None:
        """`is_stopping` is true once the worker was asked to stop: a second signal would not let it drain."""
        self._pid = os.getppid()
        self._is_stopping = is_stopping
        self._log = log

    def check(self) -> None:
        """Send this process SIGTERM, once, if the process that started it has ended."""
        if os.getppid() == self._pid:
            return
        self._pid = os.getppid()
        if not self._is_stopping():
            self._log.warning("mlx.launch has ended: this worker stops as at SIGTERM, and the other ranks with it")
            os.kill(os.getpid(), signal.SIGTERM)
