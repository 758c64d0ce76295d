"""Processes that are restarted whenever they die, all with one log."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

RESTART_DELAY_S = 0.2


class Processes:
    """Start processes and restart the dead ones, until `stop`. `watch` is called each time that they are looked at."""

    def __init__(self, root: Path, log_path: Path, watch: Callable[[], None]) -> None:
        self._root, self._log_path, self._watch = root, log_path, watch
        self._commands: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping = threading.Event()
        self._restarter = threading.Thread(target=self._restart_dead)

    def start(self, commands: Mapping[str, tuple[Sequence[str], Mapping[str, str]]]) -> None:
        """Start processes by name: each with its command and what it adds to the environment."""
        self._commands.update(commands)
        for name in commands:
            self._launch(name)
        self._restarter.start()

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def stop(self) -> None:
        """Stop all with SIGTERM."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._restarter.join()
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _launch(self, name: str) -> None:
        command, environ = self._commands[name]
        with self._log_path.open("ab") as log:
            self._running[name] = subprocess.Popen(
                command, cwd=self._root, env={**os.environ, **environ}, stdout=log, stderr=subprocess.STDOUT
            )

    def _restart_dead(self) -> None:
        while not self._stopping.wait(RESTART_DELAY_S):
            self._watch()
            for name, process in self._running.items():
                if process.poll() is not None:
                    self._launch(name)
