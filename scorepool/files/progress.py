"""Say how far the work on a file is: rows/s, tokens/s and the time that is left. Pure, but for the clock."""

from bisect import bisect_right
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from scorepool.files.output.journal import Counts

SKIPPED = 0.25  # of what is done, at the start: workers are slower in their first steps
DISTANCE = 1 / 64  # between points, as a share of what is done: so few points are kept of any file


class _Point(NamedTuple):
    at_s: float
    num_bytes: int  # done by this process


class Progress:
    """Speeds since this process began, whatever an earlier one had done."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._began_at = clock()
        self._first = Counts()
        self._points: list[_Point] = []  # from the first rows on

    def start(self, counts: Counts) -> None:
        """Note what was done before."""
        self._first = Counts(counts.num_rows, counts.num_failed, counts.num_tokens, counts.position)
        self._began_at = self._clock()

    def note(self, counts: Counts) -> None:
        """Take what is done, so that the start does not count for the time that is left."""
        num_bytes = counts.position - self._first.position
        last = self._points[-1].num_bytes if self._points else 0
        if num_bytes - last > num_bytes * DISTANCE:
            self._points.append(_Point(self._clock(), num_bytes))

    def _s_per_byte(self, num_bytes: int) -> float:
        """Return the time per byte without the first SKIPPED and the time until the first rows, if others are done."""
        index = bisect_right(self._points, num_bytes * SKIPPED, key=lambda point: point.num_bytes)
        since = self._points[max(0, index - 1)] if self._points else _Point(self._began_at, 0)
        if since.num_bytes >= num_bytes:
            since = _Point(self._began_at, 0)
        return (self._clock() - since.at_s) / (num_bytes - since.num_bytes)

    def left_s(self, counts: Counts, size: int | None) -> float | None:
        """Return the seconds that are left, None if they cannot be known yet. `size` is the input's, in bytes."""
        num_bytes = counts.position - self._first.position
        if not size or num_bytes <= 0:
            return None
        return self._s_per_byte(num_bytes) * max(0, size - counts.position)

    def line(self, counts: Counts, size: int | None) -> str:
        """Return one line. `size` is the input's, in bytes; without it neither share nor time left is known."""
        elapsed_s = max(1e-9, self._clock() - self._began_at)
        parts = [
            f"{counts.num_rows:,} rows",
            f"{(counts.num_rows - self._first.num_rows) / elapsed_s:,.1f} rows/s",
            f"{(counts.num_tokens - self._first.num_tokens) / elapsed_s:,.0f} tokens/s",
        ]
        left_s = self.left_s(counts, size)
        if size and left_s is not None:
            parts = [f"{counts.position / size:4.0%}", *parts, f"{duration(left_s)} left"]
        if counts.num_failed:
            parts.append(f"{counts.num_failed:,} failed")
        return "  ".join(parts)


def duration(seconds: float) -> str:
    """Return a time as hours, minutes and seconds."""
    minutes, left_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left_s:02}"
