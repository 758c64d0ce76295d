"""Turns of several owners: their order (OwnerTurns, pure), and a thread that gives them (OwnerThread).

Start-time fair queueing: each owner has a clock, which its turns move by what they cost, and the next turn is that of
the owner whose clock is behind. So an owner with one small job waits for one turn of any other, and an owner with a
thousand small jobs gets as much done as one with a large one. The jobs of one owner take turns with each other.
"""

import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
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


class OwnerThread:
    """One thread, on which the calls of several owners take turns. They cost the time that they take.

    It is a daemon: a process that has given its jobs back ends in the middle of a call.
    """

    def __init__(self, name: str) -> None:
        self.since: float | None = None  # time.monotonic() of the call that runs now
        self._turns: OwnerTurns[tuple[str, Callable[[], object]]] = OwnerTurns()
        self._num_waiting = 0
        self._is_closed = False
        self._changed = Condition()  # guards the above
        Thread(target=self._run, name=name, daemon=True).start()

    @property
    def is_idle(self) -> bool:
        with self._changed:
            return not self._num_waiting and self.since is None

    def submit(self, owner: str, call: Callable[[], object]) -> None:
        """Let a call wait for its turn. It must raise nothing. It is dropped if the thread is closed."""
        with self._changed:
            self._turns.put(owner, (owner, call))
            self._num_waiting += 1
            self._changed.notify()

    def close(self) -> None:
        """Drop the calls that wait. Does not wait for the one that runs."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        while turn := self._next():
            owner, call = turn
            call()
            with self._changed:
                self._turns.charge(owner, time.monotonic() - (self.since or 0.0))
                self.since = None

    def _next(self) -> tuple[str, Callable[[], object]] | None:
        """Wait for the next turn; return None if the thread is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._num_waiting)
            if self._is_closed:
                return None
            self._num_waiting -= 1
            self.since = time.monotonic()
            return self._turns.take()
