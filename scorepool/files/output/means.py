"""Compute means and their standard errors, one value after the other."""

from math import sqrt

from msgspec import Struct


class Mean(Struct):
    """The mean of `number` values. `total` is their sum, and `stderr` the standard error of the mean.

    Welford's method: it can be kept on disk and go on, and sums of squares do not cancel.
    """

    number: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of the squared differences from the mean

    def add(self, value: float) -> None:
        """Take one more value."""
        self.number += 1
        difference = value - self.mean
        self.mean += difference / self.number
        self.squares += difference * (value - self.mean)

    @property
    def total(self) -> float:
        """The sum of the values."""
        return self.mean * self.number

    @property
    def stderr(self) -> float | None:
        """The standard error of the mean, from the sample's variance (n - 1). None of less than two values."""
        return sqrt(self.squares / (self.number - 1) / self.number) if self.number > 1 else None
