"""Hold how far the running jobs are, as their workers last reported it, for the clients of one API process."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from scorepool import store, wire

logger = logging.getLogger(__name__)
MAX_JOBS = 10_000  # whose progress is kept; the one that was reported longest ago goes first

OnProgress = Callable[[wire.Progress, int], None]  # called with a progress and the bytes that it takes in Redis


class ProgressBoard:
    """The latest progress of each running job, and those who are told of the next."""

    def __init__(self) -> None:
        self._latest: dict[str, wire.Progress] = {}
        self._subscribers: dict[str, set[OnProgress]] = {}

    def latest(self, job_id: str) -> wire.Progress | None:
        """Return how far a job is; None if that is not known, or if it has ended."""
        return self._latest.get(job_id)

    def publish(self, fields: Mapping[bytes, bytes]) -> None:
        """Read one entry of the stream of tokens."""
        if b"progress" not in fields:
            return
        try:
            reported = wire.parse(fields[b"progress"], wire.Progresses, "msgpack")
        except wire.Invalid as error:
            logger.warning("a progress in %s cannot be decoded: %s", store.TOKENS, type(error).__name__)
            return
        for progress in reported:
            before = self._latest.pop(progress.id, None)
            self._latest[progress.id] = latest = max(before or progress, progress, key=_order)
            if latest is not before:
                for on_progress in self._subscribers.get(progress.id, ()):
                    on_progress(progress, len(fields[b"progress"]) // len(reported))
        while len(self._latest) > MAX_JOBS:
            del self._latest[next(iter(self._latest))]

    def forget(self, job_id: str) -> None:
        """Drop the progress of a job that has ended."""
        self._latest.pop(job_id, None)

    @contextmanager
    def subscribe(self, job_id: str, on_progress: OnProgress) -> Iterator[None]:
        """Call `on_progress` with every progress of a job that comes from now on; it must not block."""
        self._subscribers.setdefault(job_id, set()).add(on_progress)
        try:
            yield
        finally:
            self._subscribers[job_id].discard(on_progress)
            if not self._subscribers[job_id]:
                del self._subscribers[job_id]


def _order(progress: wire.Progress) -> tuple[int, ...]:
    """Order by what came later: a worker that lost its job may still report."""
    return progress.run, progress.num_tokens_done, progress.num_items_done
