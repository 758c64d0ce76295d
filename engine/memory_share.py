"""One model's part of the memory that the models of one loop share: see residency.py. Used on the MLX thread."""

import time
from collections.abc import Callable

from scorepool.engine.residency import Residency, Resident


class MemoryShare:
    """What a model may take, and how it gets it. Without a `residency` there are no other models."""

    def __init__(self, residency: Residency | None, num_bytes: int) -> None:
        """Begin with weights of this size."""
        self.resident = Resident(size_bytes=num_bytes)
        self._residency = residency

    @property
    def has_to_wait(self) -> bool:
        """True if new work waits until other models have dropped their weights. Any thread may ask."""
        return self._residency is not None and not self._residency.may_take_work(self.resident, time.monotonic())

    @property
    def has_room(self) -> bool:
        """True if no other model that is loaded takes memory that this one needs."""
        return self._residency is None or not self._residency.in_the_way(self.resident)

    def make_room(self, more_bytes: int = 0) -> None:
        """Drop the weights of others that leave no room for this model and `more_bytes`, if they compute nothing."""
        for other in [] if self._residency is None else self._residency.in_the_way(self.resident, more_bytes):
            other.drop()

    def join(self, drop: Callable[[], object], load_s: float) -> None:
        """Take part, loaded. `drop` drops the weights for another model."""
        self.resident.drop = drop
        self.resident.note_load(time.monotonic(), load_s)
        if self._residency is not None:
            self._residency.residents.append(self.resident)

    def leave(self) -> None:
        """Take part no more."""
        self.resident.drop = lambda: None  # it holds the core, whose arrays must be dropped on this thread
        if self._residency is not None:
            self._residency.residents.remove(self.resident)
