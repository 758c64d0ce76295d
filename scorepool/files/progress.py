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

    def start(self, counts: Counts) -> None:
        """Note what was done before."""
        self._first = Counts(counts.num_rows, counts.num_failed, counts.num_tokens, counts.position)
        self._began_at = self._clock()

    def line(self, counts: Counts, size: int | None) -> str:
        """Return one line. `size` is the input's, in bytes; without it neither share nor time left is known."""
        first = self._first or Counts()
        elapsed_s = max(1e-9, self._clock() - self._began_at)
        parts = [
            f"{counts.num_rows:,} rows",
            f"{(counts.num_rows - first.num_rows) / elapsed_s:,.1f} rows/s",
            f"{(counts.num_tokens - first.num_tokens) / elapsed_s:,.0f} tokens/s",
        ]
        if size and counts.position > first.position:
            left_s = elapsed_s * max(0, size - counts.position) / (counts.position - first.position)
            parts = [f"{counts.position / size:4.0%}", *parts, f"{_duration(left_s)} left"]
        if counts.num_failed:
            parts.append(f"{counts.num_failed:,} failed")
        return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, left_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left_s:02}"
