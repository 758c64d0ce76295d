"""Keep a Mac awake while there is work: a `caffeinate -i -w PID` as a child, and none while there is nothing to do.

`-i` prevents the idle sleep, `-w` ends the child with this process, also after kill -9. Other systems start nothing.
The tests run it on Linux with a fake caffeinate; it has not been run on a Mac.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from logging import Logger

from scorepool.store.clock import awake_s

LINGER_S = 30.0  # without work before the Mac may sleep, so that pauses between jobs start no process


class KeepAwake:
    """Call `update` every second or so, from one thread."""

    def __init__(self, has_work: Callable[[], bool], log: Logger) -> None:
        self._has_work = has_work
        self._log = log
        self._worked_at = -LINGER_S  # awake_s(), when there was work last
        self._process: subprocess.Popen[bytes] | None = None
        self._is_unavailable = sys.platform != "darwin"

    def update(self) -> None:
        """Begin or end to keep the machine awake."""
        if self._has_work():
            self._worked_at = awake_s()
            self._begin()
        elif awake_s() - self._worked_at >= LINGER_S:
            self.end()

    def end(self) -> None:
        """Let the machine sleep."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def _begin(self) -> None:
        if self._is_unavailable or (self._process is not None and self._process.poll() is None):
            return
        program = shutil.which("caffeinate")
        try:
            if program is None:
                raise FileNotFoundError("there is no caffeinate on the PATH")
            self._process = subprocess.Popen(
                [program, "-i", "-w", str(os.getpid())], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        except OSError as error:
            self._is_unavailable = True
            self._log.warning("this Mac may sleep while it works: %s", error)
