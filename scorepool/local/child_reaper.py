"""Ends our children when we are killed: a process that outlives its parent by a moment, on purpose.

It reads lines `+PID` (watch) and `-PID` (reaped) from the parent through a pipe. The pipe's end is the parent's end,
whatever killed it: what is still watched is then terminated, and killed if it does not obey.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

GRACE_S = 10.0


class Tether:
    """The parent's side. Children that it watches must not inherit the pipe: Popen's close_fds sees to that."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "scorepool.local.child_reaper"], stdin=subprocess.PIPE, start_new_session=True
        )

    def watch(self, pid: int) -> None:
        self._tell(f"+{pid}\n")

    def reaped(self, pid: int) -> None:
        self._tell(f"-{pid}\n")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()


def end(pids: set[int]) -> None:
    for send in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_S
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, send)
        while pids and time.monotonic() < deadline:
            time.sleep(0.05)
            pids = {pid for pid in pids if alive(pid)}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    watched: set[int] = set()
    for line in sys.stdin:
        (watched.add if line[0] == "+" else watched.discard)(int(line[1:]))
    end(watched)


if __name__ == "__main__":
    main()
