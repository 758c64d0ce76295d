"""Start the fork server, have it fork and kill, and hear how its processes end. One thread uses it."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

from scorepool.engine.text.chat.grammar_process import fork_server

_PASSED_ON = ("PATH", "PYTHON", "LD_", "DYLD_", "LANG", "LC_")  # beginnings of names; no password has one of them


class ForkServerLink:
    def __init__(self, tokenizer: bytes) -> None:
        """Start the server, and return while it starts. Raises OSError."""
        self.control, theirs = socket.socketpair()
        try:
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, "-P", fork_server.__file__],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env={
                        **{name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)},
                        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    },
                    start_new_session=True,  # a signal to the worker's group is for the worker
                )
        except OSError:
            self.control.close()
            raise
        try:
            self.control.sendall(fork_server.LENGTH.pack(len(tokenizer)) + tokenizer)
        except OSError:
            self.close()
            raise

    def fork(self, number: int) -> Connection:
        """Fork a process, and return the connection to it. Raises OSError."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(self.control, [fork_server.COMMAND.pack(fork_server.FORK, number)], [theirs.fileno()])
            return Connection(ours.detach())

    def kill(self, number: int) -> None:
        """Kill a process; nothing happens if it has ended. Raises OSError."""
        self.control.sendall(fork_server.COMMAND.pack(fork_server.KILL, number))

    def read_exits(self) -> Iterator[tuple[int, int]]:
        """Yield the number and the exit code of each process that has ended. Raises EOFError if the server has."""
        found = self.control.recv(fork_server.EXITED.size * 1024)
        if not found:
            raise EOFError
        while len(found) % fork_server.EXITED.size:
            found += self.control.recv(fork_server.EXITED.size - len(found) % fork_server.EXITED.size)
        yield from fork_server.EXITED.iter_unpack(found)

    def close(self) -> None:
        """End the server and its processes."""
        self.control.close()
        self._server.wait()


def tokenizer_message(config: object, eos_ids: list[int]) -> bytes:
    """Write the tokenizer, in the format of the `tokenizers` library, for the server."""
    return json.dumps({"tokenizer": json.dumps(config), "eos_ids": eos_ids}).encode()
