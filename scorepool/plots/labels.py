"""Name what a plot shows. Pure."""

import unicodedata
from functools import singledispatch

from scorepool.plots.statistics import MAX_POINTS, Calibration, Comparison, Histogram, Statistic, TokenSeries

UNITS = {
    "perplexity": "perplexity per token",
    "bits_per_byte": "bits per byte",
    "logprob_per_token": "logprob per token (nats)",
    "logprob_per_byte": "logprob per byte (nats)",
    "logprob_sum": "sum of logprobs (nats)",
    "num_tokens": "tokens",
}
_SHOWN = {" ": "\u00b7", "\n": "\u21b5", "\t": "\u2192", "\r": "\u240d"}


def caption(statistic: Statistic, title: str) -> str:
    """Return what the plot shows in one line: the title, e.g. the model, the number of rows, and the main figures."""
    return "; ".join(filter(None, (title, summary(statistic))))


@singledispatch
def summary(statistic: Statistic) -> str:
    """Return the number of rows and the main figures."""
    raise TypeError(type(statistic))


@summary.register
def _histogram(statistic: Histogram) -> str:
    numbers = {sketch.number for sketch in statistic.series.values()}
    low, high = number_text(statistic.minimum), number_text(statistic.maximum)
    text = f"{_rows(max(numbers))}, {low if low == high else f'{low} to {high}'}"
    missing = f"; {number_text(statistic.num_missing)} without a finite value" if statistic.num_missing else ""
    return text + missing


@summary.register
def _tokens(statistic: TokenSeries) -> str:
    perplexity = statistic.perplexity
    number = len(statistic.tokens) + statistic.num_left_out
    text = f"row {statistic.row}, {number} token{'s' if number > 1 else ''}"
    if statistic.num_left_out:
        text += f", the first {len(statistic.tokens)} of them"
    return text if perplexity is None else f"{text}, perplexity {number_text(perplexity)}"


@summary.register
def _calibration(statistic: Calibration) -> str:
    return (
        f"{_rows(statistic.number)}, accuracy {statistic.accuracy:.3f}, mean probability {statistic.confidence:.3f}, "
        f"ECE {statistic.expected_error:.3f}"
    )


@summary.register
def _comparison(statistic: Comparison) -> str:
    error = statistic.standard_error
    difference = f"{statistic.mean_difference:+.3g}" + ("" if error is None else f" \u00b1 {error:.2g}")
    share = statistic.num_lower / statistic.number
    sampled = f" ({number_text(MAX_POINTS)} drawn)" if len(statistic.points) < statistic.number else ""
    missing = f"; {number_text(statistic.num_missing)} without finite values" if statistic.num_missing else ""
    return (
        f"{_rows(statistic.number)}{sampled}; {statistic.models[1]} minus {statistic.models[0]}: {difference}, "
        f"lower in {share:.1%} of rows{missing}"
    )


def _rows(number: int) -> str:
    return f"{number_text(number)} row{'' if number == 1 else 's'}"


def number_text(value: float, num_digits: int = 3) -> str:
    """Return a number with some significant digits, and integers with separators."""
    if isinstance(value, int) and abs(value) < 10**9:
        return f"{value:,}"
    if value and not 1e-3 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{value:.{num_digits - 1}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{num_digits}g}"


def show_token(token: str, max_chars: int) -> str:
    """Return a token as a label: white space as marks, control characters as their numbers, long ones cut."""
    cut = token if len(token) <= max_chars else f"{token[: max_chars - 1]}\u2026"
    return "".join(_SHOWN.get(each) or _visible(each) for each in cut)


def _visible(character: str) -> str:
    return (
        f"U+{ord(character):04X}"
        if unicodedata.category(character) in ("Cc", "Cf", "Zs", "Zl", "Zp", "Cs")
        else character
    )
