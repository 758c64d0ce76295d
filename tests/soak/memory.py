"""Sample the memory of processes while others work."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import psutil


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process, 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


class MemorySampler:
    """A context in which the sizes of some things are measured, by name, in bytes."""

    def __init__(self, measures: Mapping[str, Callable[[], int]], period_s: float = 0.2) -> None:
        self._measures, self._period_s = measures, period_s
        self._started_at = time.monotonic()
        self.samples: dict[str, list[tuple[float, int]]] = {name: [] for name in measures}  # seconds, bytes
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stopping.wait(self._period_s):
            for name, measure in self._measures.items():
                if num_bytes := measure():
                    self.samples[name].append((time.monotonic() - self._started_at, num_bytes))

    def growth(self, name: str) -> int:
        """Return the bytes by which the mean of the last third of the samples is above that of the first third."""
        sizes = [num_bytes for _, num_bytes in self.samples[name]]
        third = max(1, len(sizes) // 3)
        return mean(sizes[-third:]) - mean(sizes[:third])

    def table(self, name: str, num_lines: int = 12) -> str:
        """Return the samples at about equal distances, one a line."""
        samples = self.samples[name]
        chosen = [samples[i * (len(samples) - 1) // (num_lines - 1)] for i in range(num_lines)] if samples else []
        return "\n".join(f"{name}  {at_s:7.1f} s  {num_bytes / 2**20:7.1f} MiB" for at_s, num_bytes in chosen)


def mean(sizes: Sequence[int]) -> int:
    return sum(sizes) // len(sizes)
