"""One MLX thread on which engines take turns: each that has work runs one step, then the next one does.

An engine is a generator here. It yields a call that tells whether it has work, and is resumed on the MLX thread for one
turn, with True if no other engine has work. It has ended when the generator returns. It must raise nothing.
"""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from threading import Condition, Event

from scorepool.engine import mlx_thread
from scorepool.engine.residency import Residency

Turns = Generator[Callable[[], bool], bool, None]


@dataclass(eq=False, slots=True)
class _Seat:
    """An engine that takes turns."""

    turns: Turns
    returned: Event = field(default_factory=Event)
    has_work: Callable[[], bool] = lambda: True
    has_begun: bool = False
    has_ended: bool = False

    def take_turn(self, is_alone: bool) -> None:
        """Run until the engine yields or returns."""
        try:
            self.has_work = self.turns.send(is_alone) if self.has_begun else next(self.turns)
        except StopIteration:
            self.has_ended = True
        self.has_begun = True


class EngineLoop:
    """The turns of the engines of one process. `start` may be called from any thread."""

    def __init__(self, residency: Residency | None = None) -> None:
        """Start no thread before the first engine. `residency` decides which engines' weights are loaded; None: all."""
        self.changed = Condition()  # guards what callers change of the engines, and is notified of each change
        self.residency = residency
        self._arrivals: list[_Seat] = []
        self._is_running = False

    def start(self, turns: Turns) -> Event:
        """Give turns to an engine. The event is set when it has ended and the thread holds nothing of it."""
        seat = _Seat(turns)
        with self.changed:
            self._arrivals.append(seat)
            self.changed.notify()
            must_start, self._is_running = not self._is_running, True
        if must_start:
            mlx_thread.start(self._run)
        return seat.returned

    def _run(self) -> None:
        """Give turns until the last engine has ended. Runs on the MLX thread."""
        seats: list[_Seat] = []
        while due := self._wait_for_work(seats):
            for seat in due:
                seat.take_turn(is_alone=len(due) == 1)
            for seat in [seat for seat in due if seat.has_ended]:
                seats.remove(seat)
                seat.returned.set()

    def _wait_for_work(self, seats: list[_Seat]) -> list[_Seat]:
        """Sleep until engines have work, and return them; none if all have ended."""
        with self.changed:
            while True:
                seats += self._arrivals
                self._arrivals.clear()
                due = [seat for seat in seats if seat.has_work()]
                if due or not seats:
                    self._is_running = bool(seats)
                    return due
                self.changed.wait(None if self.residency is None else self.residency.changes_in_s(time.monotonic()))
