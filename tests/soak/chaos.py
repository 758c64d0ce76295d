"""Send random signals to any process: SIGKILL, SIGSTOP for some seconds, SIGTERM. Make the workers' networks bad."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.fleet.link import LinkSettings
from tests.soak.cluster import APIS, PROCESSES, WORKERS, Cluster
from tests.soak.log import Log

PAUSES_S = {"redis": (0.5, 2.0, 4.0)}
DEFAULT_PAUSES_S = (1.0, 4.0, 8.0)  # two of them longer than the soak's lease
LINK_FAULTS: dict[str, dict[str, Any]] = {  # what becomes of a worker's network, for one of DEFAULT_PAUSES_S
    "hole": {"is_paused": True},
    "silent drop": {"is_dropping": True},
    "narrow link": {"up_bytes_s": 20_000.0, "down_bytes_s": 20_000.0},
    "far link": {"delay_s": 0.1, "jitter_s": 0.1},
    "small packets": {"largest_burst": 1400},
}
WEIGHTS = {**dict.fromkeys(WORKERS, 3), **dict.fromkeys(APIS, 1), "webhooks": 2, "redis": 1}


class Chaos:
    """Cause `num_signals` faults, one every `every_s` seconds on average. Half of a worker's are of its network."""

    def __init__(self, cluster: Cluster, log: Log, seed: int, num_signals: int, every_s: float) -> None:
        self._cluster = cluster
        self._log = log
        self._random = random.Random(seed)
        self._num_signals = num_signals
        self._every_s = every_s
        self._resumers: list[threading.Timer] = []

    def run(self) -> None:
        """Cause all faults, and return when every paused process runs again and every network is well."""
        for _ in range(self._num_signals):
            time.sleep(self._random.uniform(0.3, 1.7) * self._every_s)
            name = self._random.choices(PROCESSES, [WEIGHTS[name] for name in PROCESSES])[0]
            if name in WORKERS and self._random.random() < 0.5:
                self._break_link(name, self._random.choice([*LINK_FAULTS, "cut", "lost reply"]))
            else:
                self._send(name, self._random.choices(("kill", "pause", "stop"), (5, 3, 2))[0])
        for resumer in self._resumers:
            resumer.join()

    def _send(self, name: str, action: str) -> None:
        pid = self._cluster.pid(name)
        self._log.write("signal", process=name, action=action)
        with suppress(ProcessLookupError):  # it died of something else and is being restarted
            if action == "pause":
                os.kill(pid, signal.SIGSTOP)
                self._later(self._random.choice(PAUSES_S.get(name, DEFAULT_PAUSES_S)), lambda: _resume(pid))
            else:
                os.kill(pid, signal.SIGKILL if action == "kill" else signal.SIGTERM)

    def _break_link(self, name: str, fault: str) -> None:
        link = self._cluster.links[name]
        self._log.write("network", process=name, action=fault)
        if fault == "cut":
            link.cut()
        elif fault == "lost reply":
            link.lose_next_reply(lambda reply: len(reply) > 1000, resets=self._random.random() < 0.5)
        else:
            settings = LINK_FAULTS[fault]
            well = {setting: getattr(LinkSettings(), setting) for setting in settings}
            link.change(**settings)
            self._later(self._random.choice(DEFAULT_PAUSES_S), lambda: link.change(**well))

    def _later(self, after_s: float, call: Callable[[], None]) -> None:
        timer = threading.Timer(after_s, call)
        self._resumers.append(timer)
        timer.start()


def _resume(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
