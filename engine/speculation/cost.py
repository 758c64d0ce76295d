"""How long a decode step takes, as a function of its tokens, and how many tokens a row pays to verify.

Seconds are a base and a slope: a machine that waits for its weights verifies several tokens in the time of one, and
one that waits for its arithmetic does not. Steps that verify are estimated apart from plain ones: they wait for what
proposes their tokens, and for the step before. Until they had different numbers of tokens, the slope is a guess. What
is known of them is forgotten when none has run for a while, so that they are tried again, ever more seldom.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

_FREE_TOKENS = 16  # guess: so many tokens double the time of a step
_SLOPE_WEIGHT = 32.0  # of the guessed slope, in squared tokens
_GUESS_WEIGHT = 0.2  # of plain steps in the estimate of steps that verify, in steps
_FORGET = 0.98  # weight that an observation keeps with each later one
_MAX_OUTLIER = 3.0  # times the mean; a slower step was held up by something else
_MIN_GAIN = 1.1  # in tokens per second; less is not worth a pipeline that waits for every step
_PLAIN_STEPS = 2  # that are measured before others, if they only decode
_MEASURED_EVERY = 64  # steps that verify, after which plain ones are measured again
_FIRST_WAIT = 32  # plain steps after which steps that verify are tried again; doubles until they go on
_MAX_WAIT = 2048


@dataclass(slots=True)
class _Line:
    """A linear regression of the seconds of steps on their tokens, which forgets."""

    weight: float = 0.0
    _tokens: float = 0.0  # weighted means
    _seconds: float = 0.0
    _variance: float = 0.0  # weighted sums of squared deviations
    _covariance: float = 0.0

    def record(self, num_tokens: int, seconds: float) -> None:
        """Add a step."""
        if self.weight:
            seconds = min(seconds, _MAX_OUTLIER * self.estimate(num_tokens))
        before = self.weight * _FORGET
        self.weight = before + 1
        tokens_off, seconds_off = num_tokens - self._tokens, seconds - self._seconds
        self._variance = self._variance * _FORGET + tokens_off * tokens_off * before / self.weight
        self._covariance = self._covariance * _FORGET + tokens_off * seconds_off * before / self.weight
        self._tokens += tokens_off / self.weight
        self._seconds += seconds_off / self.weight

    def estimate(self, num_tokens: int) -> float:
        """Return the seconds of a step of `num_tokens`, in units of its own before any was recorded."""
        if not self.weight:
            return 1 + num_tokens / _FREE_TOKENS
        guess = self._seconds / (self._tokens + _FREE_TOKENS)
        slope = (self._covariance + _SLOPE_WEIGHT * guess) / (self._variance + _SLOPE_WEIGHT)
        slope = min(max(slope, 0.0), self._seconds / self._tokens)
        return self._seconds + slope * (num_tokens - self._tokens)


@dataclass(slots=True)
class StepCost:
    """What plain steps and steps that verify proposed tokens took."""

    _plain: _Line = field(default_factory=_Line)
    _verifying: _Line = field(default_factory=_Line)
    _num_unmeasured: int = _PLAIN_STEPS  # plain steps that are to be measured before one that verifies
    _num_verifying: int = 0  # since plain steps were measured
    _num_plain: int = 0  # since a step verified
    _wait: int = _FIRST_WAIT

    @property
    def must_measure(self) -> bool:
        """True if the next step should be a plain one, because it is not known what that takes now."""
        return self._num_unmeasured > 0

    def record(self, num_tokens: int, seconds: float, *, verifies: bool) -> None:
        """Add a step. `num_tokens` is 0 if it did more than decode, so that its seconds say nothing."""
        if num_tokens:
            (self._verifying if verifies else self._plain).record(num_tokens, seconds)
        if verifies:
            self._num_plain = 0
            self._num_verifying += 1
            if self._num_verifying == _MEASURED_EVERY:
                self._num_verifying, self._num_unmeasured, self._wait = 0, _PLAIN_STEPS, _FIRST_WAIT
        else:
            self._num_unmeasured = max(0, self._num_unmeasured - 1)
            self._num_plain += 1
            if self._num_plain == self._wait:
                self._num_plain, self._wait = 0, min(2 * self._wait, _MAX_WAIT)
                self._num_verifying, self._verifying = 0, _Line()

    def estimate_plain(self, num_tokens: int) -> float:
        """Return the seconds of a step of as many rows, in units of its own before any was recorded."""
        return self._plain.estimate(num_tokens)

    def estimate_verifying(self, num_tokens: int) -> float:
        """Return the seconds of a step of so many tokens, rows times what each verifies."""
        known, guess = self._verifying.weight, self._plain.estimate(num_tokens)
        if not known:
            return guess
        return (known * self._verifying.estimate(num_tokens) + _GUESS_WEIGHT * guess) / (known + _GUESS_WEIGHT)


def choose_width(cost: StepCost, rows: Iterable[tuple[float, int]], max_width: int) -> int:
    """Return how many proposed tokens, at most, each row verifies in the next step; 0 if none pay.

    rows  of each decoding row: the rate at which its proposed tokens are accepted, and how many it has
    A row with fewer is padded, so the step costs rows * (width + 1) tokens.
    """
    rows = list(rows)
    plain = best_speed = len(rows) / cost.estimate_plain(len(rows))
    best, num_expected = 0, float(len(rows))
    for width in range(1, min(max_width, max((length for _, length in rows), default=0)) + 1):
        num_expected += sum(rate**width for rate, length in rows if length >= width)
        speed = num_expected / cost.estimate_verifying(len(rows) * (width + 1))
        if speed > best_speed and speed > plain * _MIN_GAIN:
            best, best_speed = width, speed
    return best
