"""Terminate this process's children when it dies, even by SIGKILL.

The reaper is a small child process. It reads lines `+PID` (watch), `-PID` (unwatch) and `/FOLDER` (delete at the end)
from a pipe. When its parent dies, however that happens, the pipe closes; the reaper then terminates every watched
process, kills those that do not end within GRACE_S, and deletes the folders. If there are folders, it kills at once.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

GRACE_S = 10.0


class ChildReaper:
    """The parent's end of the pipe. Watched children must not inherit it; Popen's close_fds ensures that."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "scorepool.local.child_reaper"], stdin=subprocess.PIPE, start_new_session=True
        )

    def watch(self, pid: int) -> None:
        """Terminate the process when this one dies."""
        self._send(f"+{pid}\n")

    def unwatch(self, pid: int) -> None:
        """Forget a process that has ended."""
        self._send(f"-{pid}\n")

    def delete_folder(self, folder: Path) -> None:
        """Delete a folder, given by its absolute path, after the watched processes have ended."""
        self._send(f"{folder}\n")

    def close(self) -> None:
        """Terminate the processes that are still watched, delete the folders, and end the reaper."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()


def terminate(pids: set[int], signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGKILL)) -> None:
    """Send each signal to the processes that are still alive, GRACE_S after the one before."""
    for signal_number in signals:
        deadline = time.monotonic() + GRACE_S
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        while pids and time.monotonic() < deadline:
            time.sleep(0.05)
            pids = {pid for pid in pids if is_alive(pid)}


def is_alive(pid: int) -> bool:
    """True if a process with this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Run the reaper on standard input."""
    watched: set[int] = set()
    folders = []
    for line in sys.stdin:
        if line[0] == "/":
            folders.append(line.rstrip("\n"))
        else:
            (watched.add if line[0] == "+" else watched.discard)(int(line[1:]))
    if folders:  # there is nothing to save
        terminate(watched, (signal.SIGKILL,))
    else:
        terminate(watched)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
