"""How many prompt tokens a step computes beside decoding rows, by what steps have cost. Knows no clock.

A decoding row gets its next token when the whole step is computed. So prefill beside it is given a time, not a number
of tokens: the same time is hundreds of tokens of a small model on a fast GPU, and a few on a CPU.

    seconds of a step = those of a step that only decodes + prompt tokens * seconds of a prompt token

A step is launched before the one before it is read, so a part of its cost is measured with its neighbour. A step that
only decodes is measured between others that do, and the others are measured in sums. Until both have been measured,
steps that only prefill say what a prompt token costs: most rows that decode have come through one.
"""

MIN_TOKENS = 32  # prompt tokens of a step, however slow: fewer cost almost as much
_WEIGHT = 0.1  # of the latest step in the averages
_MAX_OUTLIER = 5.0  # times the average; a slower step was held up by something else
_MAX_MIXED_STEPS = 100  # one after the other, before some steps only decode, so that their cost is known
_NUM_DECODE_STEPS = 3


class PrefillPace:
    """The average cost of steps, and the prompt tokens that fit into a time."""

    def __init__(self, max_s: float, first_tokens: int) -> None:
        """Start without an estimate.

        max_s         seconds that prefill adds to a step, at most, unless MIN_TOKENS take longer
        first_tokens  prompt tokens of a step before one beside decoding rows was measured, at most
        """
        self._max_s = max_s
        self._first_tokens = first_tokens
        self._decode_s: float | None = None  # averages of steps that only decode
        self._mixed_s: float | None = None  # averages of steps that prefill, and of their neighbours
        self._mixed_tokens = 0.0
        self._num_mixed = 0
        self._num_decode = _NUM_DECODE_STEPS
        self._prefill_s: float | None = None  # averages of steps that only prefill
        self._prefill_tokens = 0.0

    @property
    def max_tokens(self) -> int:
        """The prompt tokens of the next step beside decoding rows; 0 if it should only decode."""
        if self._num_mixed >= _MAX_MIXED_STEPS:
            return 0
        seconds = 0.0 if self._mixed_s is None else self._mixed_s - (self._decode_s or 0.0)
        if seconds > 0:
            return self._fitting(self._mixed_tokens, seconds)
        if not self._prefill_s:
            return self._first_tokens
        return min(self._first_tokens, self._fitting(self._prefill_tokens, self._prefill_s))

    @property
    def decodes_fast(self) -> bool:
        """True if a step that only decodes takes less time than prefill may add to one; False if none was measured."""
        return self._decode_s is not None and self._decode_s < self._max_s

    def _fitting(self, num_tokens: float, seconds: float) -> int:
        """Return how many tokens fit into a step if so many take so long."""
        return max(MIN_TOKENS, int(self._max_s * num_tokens / seconds))

    def record_prefill(self, num_prefilled: int, seconds: float) -> None:
        """Add a step that only prefills."""
        self._prefill_s = _average(self._prefill_s, seconds, _MAX_OUTLIER)
        self._prefill_tokens = _average(self._prefill_tokens or None, num_prefilled)

    def record(self, num_prefilled: int, seconds: float | None, num_prefilled_next: int) -> None:
        """Add a step with decoding rows, and the prompt tokens of the step that was launched meanwhile.

        Without `seconds`, because other work took a part of the time, it counts as a step and not in the averages.
        """
        is_mixed = bool(num_prefilled or num_prefilled_next or self._num_decode == 0)
        self._num_mixed += is_mixed
        if seconds is not None and is_mixed:
            self._mixed_s = _average(self._mixed_s, seconds, _MAX_OUTLIER)
            self._mixed_tokens = _average(self._mixed_tokens or None, num_prefilled)
        elif seconds is not None:
            self._decode_s = _average(self._decode_s, seconds, _MAX_OUTLIER)
        self._num_decode = 0 if num_prefilled else self._num_decode + 1
        if self._num_decode >= _NUM_DECODE_STEPS:
            self._num_mixed = 0


def _average(before: float | None, value: float, max_outlier: float | None = None) -> float:
    """Return the moving average with one value more, which counts for no more than `max_outlier` times the average."""
    if before is None:
        return value
    if max_outlier is not None:
        value = min(value, before * max_outlier)
    return before + _WEIGHT * (value - before)
