"""Keep the distribution of any number of values in bounded memory. Pure."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

BINS_PER_E = 2**14  # between a value and e times the value: values are known within 0.006 %


class Sketch:
    """A histogram whose bins have a constant relative width. Minimum, maximum and number are exact."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, int]] = Counter()  # by sign and index, which sort as the values do
        self.number = 0
        self.minimum = math.inf
        self.maximum = -math.inf

    def add(self, value: float) -> None:
        """Add a finite value."""
        sign = (value > 0) - (value < 0)
        index = sign * math.floor(math.log(abs(value)) * BINS_PER_E) if sign else 0
        self._counts[sign, index] += 1
        self.number += 1
        self.minimum = min(self.minimum, value)
        self.maximum = max(self.maximum, value)

    def quantile(self, fraction: float) -> float:
        """Return the value below which this fraction of the values lies. There must be one."""
        rank = fraction * (self.number - 1)
        seen = 0
        for value, count in self._values():
            seen += count
            if seen > rank:
                return value
        return self.maximum

    def histogram(self, edges: Sequence[float]) -> list[int]:
        """Count the values between each two of the edges, which ascend. The last bin holds its upper edge."""
        counts = [0] * (len(edges) - 1)
        bin_index = 0
        for value, count in self._values():
            while bin_index < len(counts) - 1 and value >= edges[bin_index + 1]:
                bin_index += 1
            if edges[0] <= value <= edges[-1]:
                counts[bin_index] += count
        return counts

    def _values(self) -> Iterator[tuple[float, int]]:
        """Yield the middles of the bins, ascending, and their counts. None lies outside of the values."""
        for (sign, index), count in sorted(self._counts.items()):
            middle = sign * math.exp((sign * index + 0.5) / BINS_PER_E) if sign else 0.0
            yield min(max(middle, self.minimum), self.maximum), count
