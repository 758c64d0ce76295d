"""Choose the length of a worker's leases by how long its heartbeats take. Knows no clock and no Redis.

SCOREPOOL_LEASE_S is the length on a good link. Where heartbeats are answered late or fail, as on bad Wi-Fi, leases are
longer, so that a late heartbeat does not cost a worker its jobs. Other workers judge by the expiry in Redis, so they
need not know.

    length.begin(now_s)    before each heartbeat, also before one that repeats a failed one
    length.end(now_s)      after one that was answered
"""

from collections import deque

BEATS_PER_LEASE = 5  # heartbeats in the length that is set
NUM_BEATS = 16  # answered heartbeats of which the slowest counts: those of the last three leases
MAX_LATE_BEATS = 3  # as slow as the slowest one, each after a pause, that a lease outlasts
MAX_FACTOR = 3  # of the length that is set: the jobs of a Mac that vanishes must not wait for longer


class LeaseLength:
    """The length of leases. One thread calls `begin` and `end`, any thread may read `seconds`."""

    def __init__(self, setting_s: float) -> None:
        self.seconds = setting_s
        self.setting_s = setting_s
        self._answer_s: deque[float] = deque(maxlen=NUM_BEATS)
        self._begun_at: float | None = None  # of the first heartbeat since the last answer

    def begin(self, now_s: float) -> None:
        """Take the beginning of a heartbeat. What failed before it counts as part of it."""
        if self._begun_at is None:
            self._begun_at = now_s
        self._adapt(now_s - self._begun_at)

    def end(self, now_s: float) -> None:
        """Take the answer to the heartbeat that has begun."""
        assert self._begun_at is not None
        self._answer_s.append(now_s - self._begun_at)
        self._begun_at = None
        self._adapt(0.0)

    def _adapt(self, unanswered_s: float) -> None:
        slowest_s = max([unanswered_s, *self._answer_s])
        needed_s = MAX_LATE_BEATS * (self.setting_s / BEATS_PER_LEASE + slowest_s)
        self.seconds = min(max(self.setting_s, needed_s), MAX_FACTOR * self.setting_s)
