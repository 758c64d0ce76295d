"""Drop ids of expired jobs from lists and registries, a bounded number at a time."""

from collections.abc import Sequence

from redis import Redis

from scorepool.store.clock import awake_s
from scorepool.store.scripts import load

MAX_CALLS = 50  # in one run; each takes a few milliseconds of Redis
MAX_SHARE = 1 / 12  # of the interval, in which a run begins calls: heartbeats wait for it, and the link may be slow


class Sweep:
    """A periodic task of each worker, for the queues that it serves. Several workers may run it at once."""

    def __init__(self, connection: Redis, queues: Sequence[str], every_s: float) -> None:
        self.every_s = every_s
        self._queues = queues
        self._script = connection.register_script(load("sweep.lua"))

    def run(self) -> None:
        """Drop ids until none are left, with at most MAX_CALLS calls. The next run goes on."""
        ends_at = awake_s() + MAX_SHARE * self.every_s
        for _ in range(MAX_CALLS):
            if not self._script(args=[self.every_s, *self._queues]) or awake_s() >= ends_at:
                return
