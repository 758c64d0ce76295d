"""Decide which models' weights are in memory, where not all fit at once. Knows no tensors, no thread, no clock.

    waits ──► is first in line, and there is room or others may be dropped ──► loaded ──► dropped

A model that is not loaded and has work waits in line. Those that make room for it are the least recently used of the
loaded ones, idle ones first. Loading costs seconds, so a loaded model is not dropped at once:

- while it has work, it stays for `turn_s` after its load; then it takes no new work, ends what runs, and is dropped,
- while it is idle, it stays for as long as its load took, because its next work may be on its way.

So the wait of a model is bounded by the turns of those before it in line, and loads take a bounded share of the time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

SOON_S = 0.001  # until the next look, if the time has passed since the last one
MIN_LINGER_S = 0.1  # for which an idle model stays that was loaded just now


@dataclass(eq=False, slots=True)
class Resident:
    """A model that shares the memory. Times are in seconds of one monotonic clock."""

    size_bytes: int = 0  # of its weights, and of its caches at most
    drop: Callable[[], object] = lambda: None  # drops the weights of a model that computes nothing
    is_loaded: bool = False
    loaded_at: float = -math.inf
    load_s: float = 0.0  # how long the last load took
    num_loads: int = 0
    used_at: float = -math.inf  # when it last had work
    is_computing: bool = False  # some of its work has begun
    has_work: bool = False  # also if none has begun
    waits_since: float | None = None  # it is in line

    def note_work(self, is_computing: bool, has_work: bool, now_s: float) -> None:
        """Record whether it computes, and whether it has work."""
        if has_work or self.has_work:
            self.used_at = now_s
        self.is_computing, self.has_work = is_computing, has_work
        if not has_work or self.is_loaded:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = now_s

    def note_load(self, now_s: float, load_s: float) -> None:
        """Record that it is loaded now."""
        self.is_loaded, self.loaded_at, self.load_s, self.used_at, self.waits_since = True, now_s, load_s, now_s, None
        self.num_loads += 1

    def leaves_at(self, turn_s: float) -> float:
        """Return the time from which on it makes room for others."""
        turn_ends_at = self.loaded_at + turn_s
        return turn_ends_at if self.has_work else min(turn_ends_at, self.used_at + max(MIN_LINGER_S, self.load_s))


class Residency:
    """The models that share `memory_bytes`. Used on the MLX thread, except where it says so."""

    def __init__(self, memory_bytes: int | None, turn_s: float) -> None:
        """Start without models. `memory_bytes` is None until it is known; then there is room for all."""
        self.memory_bytes = memory_bytes
        self.turn_s = turn_s
        self.residents: list[Resident] = []

    def may_take_work(self, resident: Resident, now_s: float) -> bool:
        """True if new work may begin: it is loaded and need not make room, or may be loaded now.

        Any thread may ask; on others than the MLX thread the answer may be out of date.
        """
        first = self._first_in_line
        if resident.is_loaded:
            return first is None or now_s < resident.leaves_at(self.turn_s) or resident not in self.in_the_way(first)
        if first is not None and first is not resident:
            return False
        others = self.in_the_way(resident)
        return all(not other.is_computing and now_s >= other.leaves_at(self.turn_s) for other in others)

    def changes_in_s(self, now_s: float) -> float | None:
        """Return the time until a loaded model must make room for the first in line; None if nobody is in line."""
        first = self._first_in_line
        if first is None:
            return None
        waits_s = [other.leaves_at(self.turn_s) - now_s for other in self.in_the_way(first)]
        return min((wait_s for wait_s in waits_s if wait_s > 0), default=SOON_S)

    def in_the_way(self, resident: Resident, more_bytes: int = 0) -> list[Resident]:
        """Return the loaded ones that leave no room for it: idle ones, the least recently used first, then others.

        `more_bytes` is what it needs beyond its size.
        """
        loaded = [other for other in list(self.residents) if other.is_loaded and other is not resident]
        if self.memory_bytes is None:
            return []
        missing = resident.size_bytes + more_bytes + sum(other.size_bytes for other in loaded) - self.memory_bytes
        found = []
        for other in sorted(loaded, key=lambda other: (other.has_work, other.used_at)):
            if missing <= 0:
                break
            found.append(other)
            missing -= other.size_bytes
        return found

    @property
    def _first_in_line(self) -> Resident | None:
        waiting = [(since, one) for one in list(self.residents) if (since := one.waits_since) is not None]
        return min(waiting, key=lambda pair: pair[0])[1] if waiting else None
