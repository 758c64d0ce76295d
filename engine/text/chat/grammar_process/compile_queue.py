"""Decide which grammar is compiled next. Knows no processes and no clock.

A grammar first gets a short time. One that needs more starts again in the next lane, where it holds up only others that
need as long. In each lane the next one is of the owner that has used the least time (start-time fair queueing), so an
owner of many slow grammars waits for itself.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


@dataclass(frozen=True, slots=True)
class Lane:
    limit_s: float  # of CPU time, for one grammar
    num_slots: int  # grammars compiled at the same time
    niceness: int


LANES = (Lane(0.05, num_slots=2, niceness=0), Lane(0.4, num_slots=1, niceness=5), Lane(3.0, num_slots=1, niceness=15))
MAX_CLOCKS = 1024  # above which those are dropped that say no more than the common clock


class Queued(Protocol):
    owner: str
    lane: Lane


T = TypeVar("T", bound=Queued)


@dataclass(slots=True)
class _LaneState(Generic[T]):
    waiting: dict[str, deque[T]] = field(default_factory=dict)  # by owner
    running: set[T] = field(default_factory=set)


@dataclass(slots=True)
class CompileQueue(Generic[T]):
    _lanes: dict[Lane, _LaneState[T]] = field(default_factory=lambda: {lane: _LaneState() for lane in LANES})
    _clocks: dict[str, float] = field(default_factory=dict)  # seconds used by each owner
    _clock: float = 0.0  # of the owner that was served last: one that comes back does not get what it has missed

    def put(self, one: T) -> None:
        """Let a grammar wait in its lane."""
        self._lanes[one.lane].waiting.setdefault(one.owner, deque()).append(one)

    def take(self) -> T | None:
        """Return a grammar that is to be compiled now, or None. It takes a slot until `done`."""
        for lane, state in self._lanes.items():
            if state.waiting and len(state.running) < lane.num_slots:
                owner = min(state.waiting, key=self._clock_of)
                queue = state.waiting[owner]
                one = queue.popleft()
                if not queue:
                    del state.waiting[owner]
                self._clock = self._clock_of(owner)
                state.running.add(one)
                return one
        return None

    def done(self, one: T, used_s: float) -> None:
        """Free the slot of a grammar, if it has one, and charge its owner."""
        running = self._lanes[one.lane].running
        if one in running:
            running.remove(one)
            self._clocks[one.owner] = self._clock_of(one.owner) + used_s
            if len(self._clocks) > MAX_CLOCKS:
                self._clocks = {owner: clock for owner, clock in self._clocks.items() if clock > self._clock}

    def clear(self) -> list[T]:
        """Remove and return all grammars, waiting ones and those that are being compiled."""
        found = [one for state in self._lanes.values() for queue in state.waiting.values() for one in queue]
        found += [one for state in self._lanes.values() for one in state.running]
        for state in self._lanes.values():
            state.waiting.clear()
            state.running.clear()
        return found

    def _clock_of(self, owner: str) -> float:
        return max(self._clock, self._clocks.get(owner, 0.0))


def next_lane(lane: Lane) -> Lane | None:
    """Return the lane of a grammar that needs more than this one gives; None if there is none."""
    return next((other for other in LANES if other.limit_s > lane.limit_s), None)
