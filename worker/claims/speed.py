"""Measure how fast a worker ends jobs while it has any. Pure: no clock, no Redis."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MAX_JOBS = 64  # of the measure, like MAX_BUSY_S, unless jobs ended at fewer than MIN_ENDS times
MAX_BUSY_S = 30.0
MIN_ENDS = 4
TOGETHER_S = 0.01  # ends closer than this count as one: an exchange with Redis records any number at once


@dataclass(frozen=True, slots=True)
class Ends:
    """Jobs that ended together."""

    busy_s: float  # of the worker, since its start
    num_jobs: int
    work: float


class Speed:
    """The jobs and the work of the last ends, per second in which the worker had jobs.

    Call `advance` with a time before each change of what it has.
    """

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._at: float | None = None  # the time of the last call, s, if there were jobs
        self._ends: deque[Ends] = deque([Ends(0.0, 0, 0.0)])  # the first one begins the measure

    def advance(self, now_s: float, is_busy: bool) -> None:
        """Count the time since the last call if there were jobs then. `is_busy`: there are jobs from now on."""
        if self._at is not None:
            self._busy_s += now_s - self._at
        self._at = now_s if is_busy else None

    def end(self, work: float) -> None:
        """Count a job that has just ended."""
        last = self._ends[-1]
        if len(self._ends) > 1 and self._busy_s - last.busy_s < TOGETHER_S:
            self._ends[-1] = Ends(last.busy_s, last.num_jobs + 1, last.work + work)
        else:
            self._ends.append(Ends(self._busy_s, 1, work))
        while len(self._ends) > MIN_ENDS and (
            self._num_jobs > MAX_JOBS or self._busy_s - self._ends[0].busy_s > MAX_BUSY_S
        ):
            self._ends.popleft()

    @property
    def busy_s(self) -> float:
        """How long the worker had jobs, since its start."""
        return self._busy_s

    @property
    def jobs_per_s(self) -> float | None:
        """Jobs that end per second, None before the first has ended. Any thread may read it."""
        return self._per_second(lambda ends: ends.num_jobs)

    @property
    def work_per_s(self) -> float | None:
        """Work that ends per second, None before the first job has ended. Any thread may read it."""
        return self._per_second(lambda ends: ends.work)

    @property
    def _num_jobs(self) -> int:
        """Jobs of the measure."""
        return sum(ends.num_jobs for ends in self._ends) - self._ends[0].num_jobs

    def _per_second(self, amount: Callable[[Ends], float]) -> float | None:
        first, *others = list(self._ends)  # a copy, made at once: another thread may count an end meanwhile
        if not others:
            return None
        return sum(map(amount, others)) / max(self._busy_s - first.busy_s, 1e-6)
