"""Hold how far the score and classify jobs are that run. Knows no Redis.

    publisher's thread      take: reads the sequences of each job, at most once in PROGRESS_EVERY_S

The engine does nothing for it. A job that ends within PROGRESS_EVERY_S reports no progress.
"""

import math
import time
from collections.abc import Iterable
from threading import Lock

from msgspec.structs import replace

from scorepool import wire
from scorepool.engine import Sequence

PROGRESS_EVERY_S = 1.0


class JobProgress:
    """How far one run of a job is. `num_failed` of its items are not among the sequences."""

    def __init__(self, job_id: str, sequences: Iterable[Sequence], num_failed: int = 0, run: int = 0) -> None:
        self._running = list(sequences)
        self._reported = wire.Progress(
            id=job_id,
            run=run,
            num_items=len(self._running) + num_failed,
            num_items_done=num_failed,
            num_tokens=sum(sequence.num_input_tokens for sequence in self._running),
            num_tokens_done=0,
        )
        self._num_ended_tokens = 0  # tokens of the sequences that are done

    def read(self) -> wire.Progress | None:
        """Return how far the job is; None if that is no farther than before. The engine may run meanwhile."""
        running: list[Sequence] = []
        num_computed = 0
        for sequence in self._running:
            if sequence.is_done:
                self._num_ended_tokens += sequence.num_input_tokens
            else:
                running.append(sequence)
                num_computed += min(sequence.num_computed, sequence.num_input_tokens)
        before, self._running = self._reported, running
        num_tokens_done = max(before.num_tokens_done, self._num_ended_tokens + num_computed)  # caches can be dropped
        self._reported = replace(
            before, num_items_done=before.num_items - len(running), num_tokens_done=num_tokens_done
        )
        return None if self._reported == before else self._reported


class RunningJobs:
    """The progress of the jobs that run."""

    def __init__(self) -> None:
        self._lock = Lock()  # guards the jobs
        self._jobs: dict[JobProgress, None] = {}
        self._taken_at = -math.inf  # time.monotonic()

    def add(self, job: JobProgress) -> None:
        with self._lock:
            if not self._jobs:
                self._taken_at = time.monotonic()
            self._jobs[job] = None

    def remove(self, job: JobProgress) -> None:
        with self._lock:
            self._jobs.pop(job, None)

    @property
    def due_in_s(self) -> float | None:
        """The seconds until there may be something to take; None if no job runs."""
        with self._lock:
            return max(0.0, self._taken_at + PROGRESS_EVERY_S - time.monotonic()) if self._jobs else None

    def take(self) -> list[wire.Progress]:
        """Return the progress of the jobs that advanced, once in PROGRESS_EVERY_S."""
        if self.due_in_s != 0.0:
            return []
        with self._lock:
            self._taken_at = time.monotonic()
            jobs = list(self._jobs)
        return [progress for job in jobs if (progress := job.read())]
