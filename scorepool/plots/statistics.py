"""Compute what each kind of plot shows, from the rows of a file, in bounded memory. Knows no drawing.

Each class is made of rows by its class method, which raises BadInput if the rows have not the columns that it needs.
"""

import math
import random
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from scorepool.files import BadInput
from scorepool.files.rows import Values
from scorepool.plots.sketch import Sketch

MAX_POINTS = 20_000  # of a comparison that are drawn: a uniform sample
MAX_TOKENS = 480  # of a text that are drawn
NUM_CONFIDENCE_BINS = 10
NUM_BINS = 41  # of a histogram: odd, so that equal values lie in the middle one
WIDE = 20.0  # ratio of the largest to the smallest value from which an axis is logarithmic
PERPLEXITY = "perplexity"
BITS_PER_BYTE = "bits_per_byte"
CHOICE_PROBABILITY = "choice_probability"
CORRECT = "acc"
Z = 1.96  # of an interval that holds 95 % of a normal distribution


@dataclass(slots=True)
class Histogram:
    """The distribution of a number in the rows, for each of one or several models."""

    quantity: str
    series: dict[str, Sketch]  # by model; an empty name if there is but one
    num_missing: int = 0  # values that are not finite numbers

    @classmethod
    def of(cls, rows: Iterable[Values], column: str | None) -> "Histogram":
        """Take the distribution of the columns that are called `column`, perplexity by default, or end with it."""
        quantity = column or PERPLEXITY
        first, rows = _first(rows)
        found = cls(quantity, {name: Sketch() for name in _columns(first, quantity)})
        for values in rows:
            for name, sketch in found.series.items():
                value = _number(values.get(name))
                if value is None:
                    found.num_missing += 1
                else:
                    sketch.add(value)
        if not any(sketch.number for sketch in found.series.values()):
            raise BadInput(f"no row has a finite {quantity!r}")
        found.series = {_model(name, quantity): each for name, each in found.series.items() if each.number}
        return found

    @property
    def minimum(self) -> float:
        return min(sketch.minimum for sketch in self.series.values())

    @property
    def maximum(self) -> float:
        return max(sketch.maximum for sketch in self.series.values())

    @property
    def is_logarithmic(self) -> bool:
        return self.minimum > 0 and self.maximum > WIDE * self.minimum

    def edges(self, num_bins: int = NUM_BINS) -> list[float]:
        """Return the edges of bins that hold all values, of equal width on the axis."""
        low, high = self.minimum, self.maximum
        margin = 0.02 * max(abs(low), abs(high)) or 0.5
        if high - low < 2 * margin:  # all equal, or nearly
            low, high = low - margin, high + margin
        if not self.is_logarithmic:
            return [low + (high - low) * index / num_bins for index in range(num_bins)] + [high]
        ratio = high / low
        return [low * ratio ** (index / num_bins) for index in range(num_bins)] + [high]


@dataclass(slots=True)
class TokenSeries:
    """The logprobs along one text."""

    row: int  # 1 is the first
    tokens: list[str]
    logprobs: list[float | None]  # natural
    num_left_out: int = 0

    @classmethod
    def of(cls, rows: Iterable[Values], row: int) -> "TokenSeries":
        """Take the tokens of a row."""
        values = next(islice(rows, row - 1, row), None)
        if values is None:
            raise BadInput(f"there is no row {row}: expected --row from 1 to the number of rows")
        names = [name for name in values if name.endswith("tokens") and f"{name[:-6]}logprobs" in values]
        tokens = _list(values.get(names[0])) if names else None
        logprobs = _list(values.get(f"{names[0][:-6]}logprobs")) if names else None
        if not tokens or not logprobs or len(tokens) != len(logprobs):
            raise BadInput(
                f"row {row} has no tokens with logprobs: expected the columns 'tokens' and 'logprobs', which --tokens "
                "adds"
            )
        numbers = [_number(each) for each in logprobs[:MAX_TOKENS]]
        return cls(row, [str(each) for each in tokens[:MAX_TOKENS]], numbers, max(0, len(tokens) - MAX_TOKENS))

    @property
    def perplexity(self) -> float | None:
        """The perplexity of the tokens that are drawn."""
        known = [each for each in self.logprobs if each is not None]
        with suppress(OverflowError, ZeroDivisionError):
            return math.exp(-math.fsum(known) / len(known))
        return None


@dataclass(slots=True)
class Calibration:
    """How often the likeliest choice is right, by its probability, in bins of equal width from 0 to 1."""

    counts: list[int] = field(default_factory=lambda: [0] * NUM_CONFIDENCE_BINS)
    confidence_sums: list[float] = field(default_factory=lambda: [0.0] * NUM_CONFIDENCE_BINS)
    num_correct: list[float] = field(default_factory=lambda: [0.0] * NUM_CONFIDENCE_BINS)

    @classmethod
    def of(cls, rows: Iterable[Values]) -> "Calibration":
        """Count the rows whose choices were scored and whose answer is known."""
        first, rows = _first(rows)
        name = _columns(first, CHOICE_PROBABILITY)[0]
        correct_name = f"{name[: -len(CHOICE_PROBABILITY)]}{CORRECT}"
        if correct_name not in first:
            raise BadInput(f"no column {correct_name!r}: score the rows with --choices and --answer")
        found = cls()
        for values in rows:
            correct = _number(values.get(correct_name))
            probabilities = [_number(each) for each in _list(values.get(name)) or ()]
            known = [each for each in probabilities if each is not None and 0.0 <= each <= 1.0]
            if correct is not None and known and len(known) == len(probabilities):
                found.add(max(known), correct)
        if not found.number:
            raise BadInput(f"no row has values in the columns {name!r} and {correct_name!r}")
        return found

    def add(self, confidence: float, correct: float) -> None:
        """Count a row, `correct` being 1.0 or 0.0. A probability on an edge belongs to the upper bin, 1 to the last."""
        index = min(int(confidence * NUM_CONFIDENCE_BINS), NUM_CONFIDENCE_BINS - 1)
        self.counts[index] += 1
        self.confidence_sums[index] += confidence
        self.num_correct[index] += correct

    @property
    def number(self) -> int:
        return sum(self.counts)

    @property
    def accuracy(self) -> float:
        return math.fsum(self.num_correct) / self.number

    @property
    def confidence(self) -> float:
        """The mean."""
        return math.fsum(self.confidence_sums) / self.number

    @property
    def expected_error(self) -> float:
        """The expected calibration error: the mean of |accuracy - confidence| of the bins, weighted by their rows."""
        pairs = zip(self.num_correct, self.confidence_sums, strict=True)
        return math.fsum(abs(correct - confidence) for correct, confidence in pairs) / self.number

    def interval(self, index: int) -> tuple[float, float]:
        """Return Wilson's 95 % interval of the accuracy in a bin that has rows."""
        number, share = self.counts[index], self.num_correct[index] / self.counts[index]
        middle = (share + Z**2 / (2 * number)) / (1 + Z**2 / number)
        half = Z / (1 + Z**2 / number) * math.sqrt(share * (1 - share) / number + Z**2 / (4 * number**2))
        return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(slots=True)
class Comparison:
    """A quantity of the rows under two models. Points are a uniform sample; the other numbers count all rows."""

    quantity: str
    models: tuple[str, str]
    points: list[tuple[float, float]] = field(default_factory=list)
    number: int = 0
    num_missing: int = 0
    num_lower: int = 0  # rows of which the second model has the lower value
    _mean: float = 0.0  # of the differences, second minus first
    _squares: float = 0.0  # sum of squared deviations from the mean
    _random: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311

    @classmethod
    def of(cls, rows: Iterable[Values], column: str | None, models: list[str] | None) -> "Comparison":
        """Compare two models, by default the first two of the file, by the columns MODEL_`column`."""
        quantity = column or BITS_PER_BYTE
        first, rows = _first(rows)
        served = [_model(name, quantity) for name in _columns(first, quantity)]
        chosen = models or served[:2]
        if len(chosen) != 2 or not set(chosen) <= set(served):
            raise BadInput(
                f"the models are {', '.join(chosen)}: expected two of those that have a column MODEL_{quantity}: "
                f"{', '.join(filter(None, served)) or 'none'}; `scorepool compare` writes them"
            )
        found = cls(quantity, (chosen[0], chosen[1]))
        for values in rows:
            pair = tuple(_number(values.get(f"{model}_{quantity}")) for model in chosen)
            if pair[0] is None or pair[1] is None:
                found.num_missing += 1
            else:
                found.add(pair[0], pair[1])
        if not found.number:
            raise BadInput(f"no row has a finite {quantity!r} of both {chosen[0]} and {chosen[1]}")
        return found

    def add(self, first: float, second: float) -> None:
        """Take a row. Welford's method for the mean, algorithm R for the sample."""
        self.number += 1
        self.num_lower += second < first
        difference = second - first
        deviation = difference - self._mean
        self._mean += deviation / self.number
        self._squares += deviation * (difference - self._mean)
        if len(self.points) < MAX_POINTS:
            self.points.append((first, second))
        elif (index := self._random.randrange(self.number)) < MAX_POINTS:
            self.points[index] = (first, second)

    @property
    def mean_difference(self) -> float:
        return self._mean

    @property
    def standard_error(self) -> float | None:
        """The standard error of the mean difference. None: of one row there is none."""
        return math.sqrt(self._squares / (self.number - 1) / self.number) if self.number > 1 else None


Statistic = Histogram | TokenSeries | Calibration | Comparison
KINDS = ("histogram", "tokens", "calibration", "comparison")


def kind_of(first: Values) -> str:
    """Return the kind of plot that suits the columns of a row."""
    if any(name.endswith(CHOICE_PROBABILITY) for name in first):
        return "calibration"
    return "comparison" if sum(name.endswith(f"_{BITS_PER_BYTE}") for name in first) > 1 else "histogram"


def _first(rows: Iterable[Values]) -> tuple[Values, Iterator[Values]]:
    """Return the first row and all rows. Raises BadInput if there is none."""
    iterator = iter(rows)
    first = next(iterator, None)
    if first is None:
        raise BadInput("there are no rows to plot")

    def every() -> Iterator[Values]:
        yield first
        yield from iterator

    return first, every()


def _columns(first: Values, quantity: str) -> list[str]:
    """Return the columns of a quantity: its own name, or names that end with it. Raises BadInput if there is none."""
    if quantity in first:
        return [quantity]
    if found := [name for name in first if name.endswith(f"_{quantity}")]:
        return found
    raise BadInput(f"no column {quantity!r}: the rows have {', '.join(map(repr, first)) or 'none'}")


def _model(column: str, quantity: str) -> str:
    return column.removesuffix(quantity).removesuffix("_")


def _number(value: object) -> float | None:
    """Return a finite number, also of a CSV's text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    with suppress(ValueError, OverflowError):
        number = float(value)
        return number if math.isfinite(number) else None
    return None


def _list(value: Any) -> list[Any] | None:
    """Return a list, also of a CSV's text."""
    if isinstance(value, str):
        with suppress(msgspec.DecodeError):
            value = msgspec.json.decode(value)
    return value if isinstance(value, list) else None
