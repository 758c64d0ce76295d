"""Decide which grammar is compiled next. Knows no processes.

Owners take turns. A grammar first gets a short time; one that needs more starts again in a lane of its own, where it
holds up only others that need long.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


@dataclass(frozen=True, slots=True)
class Lane:
    limit_s: float  # of CPU time, for one grammar
    num_slots: int  # grammars compiled at the same time
    has_low_priority: bool


SHORT = Lane(limit_s=0.15, num_slots=2, has_low_priority=False)
LONG = Lane(limit_s=3.0, num_slots=1, has_low_priority=True)


class Queued(Protocol):
    owner: str
    lane: Lane


T = TypeVar("T", bound=Queued)


@dataclass(slots=True)
class CompileQueue(Generic[T]):
    _waiting: dict[Lane, dict[str, deque[T]]] = field(default_factory=lambda: {SHORT: {}, LONG: {}})
    _running: dict[Lane, set[T]] = field(default_factory=lambda: {SHORT: set(), LONG: set()})

    def put(self, one: T) -> None:
        """Let a grammar wait in its lane."""
        self._waiting[one.lane].setdefault(one.owner, deque()).append(one)

    def take(self) -> T | None:
        """Return a grammar that is to be compiled now, or None. It takes a slot until `done`."""
        for lane, owners in self._waiting.items():
            if owners and len(self._running[lane]) < lane.num_slots:
                owner = next(iter(owners))
                queue = owners.pop(owner)
                one = queue.popleft()
                if queue:
                    owners[owner] = queue  # behind the other owners
                self._running[lane].add(one)
                return one
        return None

    def done(self, one: T) -> None:
        """Free the slot of a grammar, if it has one."""
        self._running[one.lane].discard(one)

    def running(self) -> list[T]:
        """Return the grammars that are being compiled."""
        return [one for lane in self._running.values() for one in lane]
