"""Copy what a child process writes to this process's stderr, and know its last line."""

import json
import os
import sys
from contextlib import suppress
from threading import Thread
from typing import IO

MAX_LINE = 4096  # bytes of the last line that are kept
JOIN_S = 2.0  # for which a pipe may stay open after its process ended: a child of that process may hold it


class ChildOutput:
    """A thread that copies a pipe until it is closed. If stderr is gone, the pipe is still read, so no child blocks."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._end = b""  # of what was read
        self._thread = Thread(target=self._copy, name="child-output", daemon=True)
        self._thread.start()

    def last_line(self) -> str:
        """Return the last line, without what marks it as a log line or an error. Call it when the process has ended."""
        self._thread.join(JOIN_S)
        lines = self._end.decode(errors="replace").rstrip().splitlines()
        line = lines[-1].strip() if lines else ""
        with suppress(ValueError, TypeError, KeyError):  # a line of text
            line = str(json.loads(line)["message"])
        return line.removeprefix("scorepool: ")

    def _copy(self) -> None:
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), 65536):
                self._end = (self._end + chunk)[-MAX_LINE:]
                with suppress(OSError, ValueError):
                    sys.stderr.flush()
                    os.write(sys.stderr.fileno(), chunk)
