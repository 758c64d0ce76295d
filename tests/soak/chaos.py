"""Send random signals to any process: SIGKILL, SIGSTOP for some seconds, SIGTERM."""

import os
import random
import signal
import threading
import time
from contextlib import suppress

from tests.soak.cluster import APIS, PROCESSES, WORKERS, Cluster
from tests.soak.log import Log

PAUSES_S = {"redis": (0.5, 2.0, 4.0)}
DEFAULT_PAUSES_S = (1.0, 4.0, 8.0)  # two of them longer than the soak's lease
WEIGHTS = {**dict.fromkeys(WORKERS, 3), **dict.fromkeys(APIS, 1), "webhooks": 2, "redis": 1}


class Chaos:
    """Send `num_signals` signals, one every `every_s` seconds on average."""

    def __init__(self, cluster: Cluster, log: Log, seed: int, num_signals: int, every_s: float) -> None:
        self._cluster = cluster
        self._log = log
        self._random = random.Random(seed)
        self._num_signals = num_signals
        self._every_s = every_s
        self._resumers: list[threading.Thread] = []

    def run(self) -> None:
        """Send all signals, and return when every paused process runs again."""
        for _ in range(self._num_signals):
            time.sleep(self._random.uniform(0.3, 1.7) * self._every_s)
            name = self._random.choices(PROCESSES, [WEIGHTS[name] for name in PROCESSES])[0]
            self._send(name, self._random.choices(("kill", "pause", "stop"), (5, 3, 2))[0])
        for resumer in self._resumers:
            resumer.join()

    def _send(self, name: str, action: str) -> None:
        pid = self._cluster.pid(name)
        self._log.write("signal", process=name, action=action)
        with suppress(ProcessLookupError):  # it died of something else and is being restarted
            if action == "pause":
                os.kill(pid, signal.SIGSTOP)
                pause_s = self._random.choice(PAUSES_S.get(name, DEFAULT_PAUSES_S))
                self._resumers.append(threading.Thread(target=_resume, args=(pid, pause_s)))
                self._resumers[-1].start()
            else:
                os.kill(pid, signal.SIGKILL if action == "kill" else signal.SIGTERM)


def _resume(pid: int, after_s: float) -> None:
    time.sleep(after_s)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
