"""Signals at random: kill -9, a sleep of seconds, a polite stop; to any process."""

import os
import random
import signal
import threading
import time
from contextlib import suppress

from tests.soak.cluster import APIS, PARTS, WORKERS, Cluster
from tests.soak.log import Log

SLEEPS_S = {"redis": (0.5, 2.0, 4.0)}
LONG_SLEEPS_S = (1.0, 4.0, 8.0)  # longer than a lease of the soak
WEIGHTS = {**dict.fromkeys(WORKERS, 3), **dict.fromkeys(APIS, 1), "webhooks": 2, "redis": 1}


class Chaos:
    """One signal after the other, `every_s` apart on average, `num_signals` in all."""

    def __init__(self, cluster: Cluster, log: Log, seed: int, num_signals: int, every_s: float) -> None:
        self._cluster = cluster
        self._log = log
        self._random = random.Random(seed)
        self._num_signals = num_signals
        self._every_s = every_s
        self._sleepers: list[threading.Thread] = []

    def run(self) -> None:
        """Returns when all were sent, and everybody is awake again."""
        for _ in range(self._num_signals):
            time.sleep(self._random.uniform(0.3, 1.7) * self._every_s)
            part = self._random.choices(PARTS, [WEIGHTS[part] for part in PARTS])[0]
            self._hit(part, self._random.choices(("kill", "sleep", "stop"), (5, 3, 2))[0])
        for sleeper in self._sleepers:
            sleeper.join()

    def _hit(self, part: str, how: str) -> None:
        pid = self._cluster.pid(part)
        self._log.write("signal", part=part, how=how)
        with suppress(ProcessLookupError):  # it has just died of something else, and is being started again
            if how == "sleep":
                os.kill(pid, signal.SIGSTOP)
                sleep_s = self._random.choice(SLEEPS_S.get(part, LONG_SLEEPS_S))
                self._sleepers.append(threading.Thread(target=_wake, args=(pid, sleep_s)))
                self._sleepers[-1].start()
            else:
                os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGTERM)


def _wake(pid: int, after_s: float) -> None:
    time.sleep(after_s)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
