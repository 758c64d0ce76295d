"""The order in which jobs of several owners take turns. Pure: no threads, no clock.

Start-time fair queueing: each owner has a clock, which its turns move by what they cost, and the next turn is that of
the owner whose clock is behind. So an owner with one small job waits for one turn of any other, and an owner with a
thousand small jobs gets as much done as one with a large one. The jobs of one owner take turns with each other.
"""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_CLOCKS = 1024  # above which those are dropped that say no more than the common clock


class OwnerTurns(Generic[T]):
    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}  # jobs by owner, the owner that has waited longest first
        self._clocks: dict[str, float] = {}  # the end of each owner's last turn
        self._clock = 0.0  # the start of the last turn

    def put(self, owner: str, job: T) -> None:
        """Let a job wait behind the others of its owner."""
        self._waiting.setdefault(owner, deque()).append(job)

    def take(self) -> T | None:
        """Return the job that has the next turn; None if none waits."""
        if not self._waiting:
            return None
        owner = min(self._waiting, key=self._clock_of)
        self._clock = self._clock_of(owner)
        jobs = self._waiting.pop(owner)
        job = jobs.popleft()
        if jobs:
            self._waiting[owner] = jobs
        return job

    def charge(self, owner: str, cost: float) -> None:
        """Move the clock of the owner that had the last turn by what it cost."""
        self._clocks[owner] = self._clock_of(owner) + cost
        if len(self._clocks) > MAX_CLOCKS:
            self._clocks = {owner: clock for owner, clock in self._clocks.items() if clock > self._clock}

    def _clock_of(self, owner: str) -> float:
        """An owner that comes back does not get the turns that it has missed."""
        return max(self._clock, self._clocks.get(owner, 0.0))
