"""Listen on a unix socket that only this user can open, and leave no file behind."""

import fcntl
import os
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from scorepool.store import SettingsError

PATH_MAX_BYTES = 103  # sun_path on macOS, without its final NUL; 107 on Linux
BACKLOG = 2048  # as uvicorn's
LOCK_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 1.0


class UnixSocket:
    """A listening socket and its file. The file has the permissions 0600 from the moment it exists."""

    def __init__(self, path: Path, listener: socket.socket) -> None:
        self.path = path
        self.listener = listener
        self._file = _identity(path)

    @classmethod
    def listen(cls, name: str) -> Self:
        """Create the file and listen. A file that a process left behind is replaced. Raises SettingsError."""
        path = Path(name).absolute()
        if len(os.fsencode(path)) > PATH_MAX_BYTES:
            raise SettingsError(f"SCOREPOOL_UDS={name!r}: expected a path of at most {PATH_MAX_BYTES} bytes")
        try:
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                _lock(folder, name)  # two processes that start at once must not both replace the file
                _remove_stale(path)
                return cls(path, _bind(path))
            finally:
                os.close(folder)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(f"SCOREPOOL_UDS={name!r}: {error}") from None

    def remove(self) -> None:
        """Remove the file, unless it is another's by now. May be called again."""
        with suppress(OSError):
            if _identity(self.path) == self._file:
                self.path.unlink()


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    umask = os.umask(0o177)  # a later chmod would leave a moment in which others can connect
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(umask)
    return listener


def _lock(folder: int, name: str) -> None:
    """Lock a folder until it is closed. Raises SettingsError."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise SettingsError(f"SCOREPOOL_UDS={name!r}: another process has locked its folder") from None
            time.sleep(0.05)
        else:
            return


def _remove_stale(path: Path) -> None:
    """Remove a socket on which nobody listens. Raises SettingsError if there is anything else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SettingsError(f"SCOREPOOL_UDS={str(path)!r} exists and is no socket: expected the path of a new file")
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(PROBE_TIMEOUT_S)
            probe.connect(str(path))
    except ConnectionRefusedError:
        path.unlink()
    except (TimeoutError, BlockingIOError):
        raise _in_use(path) from None
    else:
        raise _in_use(path)


def _in_use(path: Path) -> SettingsError:
    return SettingsError(f"SCOREPOOL_UDS={str(path)!r}: another process listens on it")


def _identity(path: Path) -> tuple[int, int, int]:
    """Return what tells a file from the one that replaces it, which may get its inode."""
    status = path.lstat()
    return status.st_dev, status.st_ino, status.st_mtime_ns
