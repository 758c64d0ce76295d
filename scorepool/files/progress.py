"""Say how far the work on a file is: rows/s, tokens/s and the time that is left. Pure, but for the clock."""

from collections.abc import Callable
from time import monotonic

from scorepool.files.journal import Counts


class Progress:
    """Speeds since this process began, whatever an earlier one had done."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._began_at = clock()
        self._first: Counts | None = None
        self._head: tuple[float, int] | None = None  # when the first rows were done, and their end in the input

    def start(self, counts: Counts) -> None:
        """Note what was done before."""
        self._first = Counts(counts.num_rows, counts.num_failed, counts.num_tokens, counts.position)
        self._began_at = self._clock()

    def note(self, counts: Counts) -> None:
        """Take what is done, so that the start does not count for the time that is left."""
        if self._head is None and counts.position > (self._first or Counts()).position:
            self._head = (self._clock(), counts.position)

    def _s_per_byte(self, counts: Counts, now: float) -> float:
        """Return the time per byte since the first rows were done, or since the start if no others are."""
        began_at, position = self._began_at, (self._first or Counts()).position
        if self._head and counts.position > self._head[1]:
            began_at, position = self._head
        return (now - began_at) / (counts.position - position)

    def left_s(self, counts: Counts, size: int | None) -> float | None:
        """Return the seconds that are left, None if they cannot be known yet. `size` is the input's, in bytes."""
        if not size or counts.position <= (self._first or Counts()).position:
            return None
        return self._s_per_byte(counts, self._clock()) * max(0, size - counts.position)

    def line(self, counts: Counts, size: int | None) -> str:
        """Return one line. `size` is the input's, in bytes; without it neither share nor time left is known."""
        first = self._first or Counts()
        elapsed_s = max(1e-9, self._clock() - self._began_at)
        parts = [
            f"{counts.num_rows:,} rows",
            f"{(counts.num_rows - first.num_rows) / elapsed_s:,.1f} rows/s",
            f"{(counts.num_tokens - first.num_tokens) / elapsed_s:,.0f} tokens/s",
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
