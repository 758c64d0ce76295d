"""Draw statistics with matplotlib. Imported on first use. Uses no global figure, and restores the settings.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; line styles differ too.
"""

import os
from collections.abc import Sequence
from functools import cache, singledispatch
from pathlib import Path
from typing import Any

from matplotlib import font_manager, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from scorepool.plots.labels import UNITS, caption, number_text, show_token
from scorepool.plots.statistics import Calibration, Comparison, Histogram, Statistic, TokenSeries

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#595959"
COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE)
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
WIDTH_IN = 6.4
DPI = 200
TOKENS_PER_COLUMN = 50
COLUMNS_PER_PAGE = 4
MAX_NATS = 20.0  # of an axis of logprobs: lower ones are drawn at its end
POINTS_AS_DOTS = 2000  # more are counted in hexagons
LABEL_CHARS = 14  # of a token
# Fonts with scripts that matplotlib's own font lacks, on macOS and Linux. Those that are installed are used.
FALLBACK_FONTS = (
    "Arial Unicode MS", "Hiragino Sans", "PingFang SC", "Apple SD Gothic Neo", "Noto Sans CJK JP", "Noto Sans",
    "Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "WenQuanYi Zen Hei", "Droid Sans Fallback",
)  # fmt: skip
STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "svg.hashsalt": "scorepool",  # the same plot is the same file
    "text.parse_math": False,
}


def save(statistic: Statistic, path: Path, title: str) -> None:
    """Draw a statistic to PATH.png or PATH.svg, in one step. Raises OSError."""
    ending = path.suffix.lower().removeprefix(".")
    with rc_context({**STYLE, "font.family": ["DejaVu Sans", *_fallback_fonts()]}):
        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)
        figure.set_size_inches(WIDTH_IN, 3.6)
        figure.suptitle(_printable(caption(statistic, title)), fontsize=9, x=0.01, ha="left", wrap=True)
        draw(statistic, figure)
        new = path.with_name(f".{path.name}.new")
        metadata = {"Date": None} if ending == "svg" else {}
        try:
            figure.savefig(new, format=ending, dpi=DPI, metadata=metadata)
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)


@singledispatch
def draw(statistic: Statistic, figure: Figure) -> None:
    """Draw a statistic on an empty figure."""
    raise TypeError(type(statistic))


@draw.register
def _histogram(statistic: Histogram, figure: Figure) -> None:
    axes = figure.add_subplot()
    edges = statistic.edges()
    for index, (model, sketch) in enumerate(statistic.series.items()):
        color, line = COLORS[index % len(COLORS)], LINES[index % len(LINES)]
        median = sketch.quantile(0.5)
        name = f"{_printable(model)}: " if model else ""
        counts = sketch.histogram(edges)
        is_only = len(statistic.series) == 1
        axes.stairs(counts, edges, color=color, fill=is_only, alpha=0.8, linewidth=1.2, linestyle=line)
        axes.axvline(
            median,
            color=RED if is_only else color,
            linewidth=1.2,
            linestyle=line if index else "--",
            label=f"{name}median {number_text(median)}",
        )
    if statistic.is_logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=8))
        axes.xaxis.set_minor_formatter(NullFormatter())
        if edges[-1] / edges[0] < 1000:
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xlabel(UNITS.get(statistic.quantity, statistic.quantity))
    axes.set_ylabel("rows")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper right")


@draw.register
def _tokens(statistic: TokenSeries, figure: Figure) -> None:
    """Draw columns of tokens from top to bottom, their bars to the right of them."""
    number = len(statistic.tokens)
    starts = range(0, number, TOKENS_PER_COLUMN)
    num_columns = min(len(starts), COLUMNS_PER_PAGE)
    num_lines = -(-len(starts) // COLUMNS_PER_PAGE)
    height = min(number, TOKENS_PER_COLUMN) * 0.145 + 0.3
    figure.set_size_inches(max(4.6, 2.0 * num_columns), 0.6 + num_lines * height)
    known = [-each for each in statistic.logprobs if each is not None and each >= -MAX_NATS]
    low = -1.08 * max(1.0, *known, 0.0)
    grid = figure.subplots(num_lines, num_columns, squeeze=False).flat
    for axes, start in zip(grid, starts, strict=False):
        part = slice(start, start + TOKENS_PER_COLUMN)
        _token_column(axes, statistic.tokens[part], statistic.logprobs[part], low)
    for axes in list(figure.axes)[len(starts) :]:
        axes.remove()
    for axes in figure.axes:
        axes.set_ylim(min(number, TOKENS_PER_COLUMN) - 0.4, -0.6)
    figure.supxlabel("logprob (nats)", fontsize=9)


def _token_column(axes: Axes, tokens: Sequence[str], logprobs: Sequence[float | None], low: float) -> None:
    positions = range(len(tokens))
    axes.barh(positions, [0.0 if each is None else max(each, low) for each in logprobs], color=BLUE, height=0.75)
    for position, logprob in enumerate(logprobs):
        if logprob is None:
            axes.text(low * 0.02, position, "none", ha="left", va="center", color=GREY, fontsize=6.5)
        elif logprob < low:
            text = number_text(logprob)
            axes.text(low * 0.98, position, text, ha="right", va="center", color="white", fontsize=6.5)
    axes.set_xlim(0, low)
    axes.set_yticks(
        positions, [_printable(show_token(token, LABEL_CHARS), LABEL_CHARS) for token in tokens], fontsize=7
    )
    axes.tick_params(axis="y", length=0, pad=2)
    axes.tick_params(axis="x", labelsize=7.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.grid(axis="x", linewidth=0.4, color="#cccccc")


@draw.register
def _calibration(statistic: Calibration, figure: Figure) -> None:
    figure.set_size_inches(4.6, 5.0)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
    number = len(statistic.counts)
    filled = [index for index in range(number) if statistic.counts[index]]
    confidences = [statistic.confidence_sums[index] / statistic.counts[index] for index in filled]
    accuracies = [statistic.num_correct[index] / statistic.counts[index] for index in filled]
    intervals = [statistic.interval(index) for index in filled]
    errors = [
        [max(0.0, share - low) for share, (low, _) in zip(accuracies, intervals, strict=True)],
        [max(0.0, high - share) for share, (_, high) in zip(accuracies, intervals, strict=True)],
    ]
    upper.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="perfect calibration")
    label = "rows, with 95 % intervals"
    upper.errorbar(
        confidences, accuracies, errors, color=BLUE, marker="o", markersize=4.5, linewidth=1.2, capsize=2, label=label
    )
    upper.set(xlim=(0, 1), ylim=(-0.02, 1.02), ylabel="accuracy (share of rows)")
    upper.legend(frameon=False, loc="upper left", fontsize=8)
    lower.bar([(index + 0.5) / number for index in range(number)], statistic.counts, width=0.92 / number, color=BLUE)
    lower.set(xlabel="probability of the picked choice", ylabel="rows")
    lower.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    lower.set_ylim(0, max(statistic.counts) * 1.25)
    for index in filled:
        place = ((index + 0.5) / number, statistic.counts[index])
        lower.annotate(number_text(statistic.counts[index]), place, ha="center", va="bottom", fontsize=7)


@draw.register
def _comparison(statistic: Comparison, figure: Figure) -> None:
    figure.set_size_inches(5.4, 4.6)
    axes = figure.add_subplot()
    low, high, num_outside = _limits(statistic.points)
    first, second = zip(*statistic.points, strict=True)
    if len(statistic.points) > POINTS_AS_DOTS:
        hexagons = axes.hexbin(first, second, gridsize=45, extent=(low, high, low, high), mincnt=1, bins="log",
                               cmap="viridis", linewidths=0.1)  # fmt: skip
        sampled = len(statistic.points) < statistic.number
        label = "rows of the sample" if sampled else "rows"
        figure.colorbar(
            hexagons, ax=axes, shrink=0.75, label=label, format=FuncFormatter(lambda count, _: number_text(count))
        )
    else:
        alpha = 0.9 if len(statistic.points) < 100 else 0.4
        axes.scatter(first, second, s=12, color=BLUE, alpha=alpha, edgecolors="none")
    axes.plot([low, high], [low, high], color=RED, linestyle="--", linewidth=1, label="equal")
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    unit = UNITS.get(statistic.quantity, statistic.quantity)
    axes.set_xlabel(_printable(f"{statistic.models[0]}\n{unit}"))
    axes.set_ylabel(_printable(f"{statistic.models[1]}\n{unit}"))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.ticklabel_format(useOffset=False)
    axes.legend(frameon=False, loc="upper left", title=f"{num_outside} outside of the axes" if num_outside else None)


def _limits(points: Sequence[tuple[float, float]]) -> tuple[float, float, int]:
    """Return limits for both axes, and how many points lie outside: those far from the other 99 %."""
    values = sorted(value for point in points for value in point)
    low, high = values[len(values) // 200], values[-1 - len(values) // 200]
    margin = 0.5 * (high - low)
    low, high = max(values[0], low - margin), min(values[-1], high + margin)
    pad = max(0.05 * (high - low), 0.02 * abs(high)) or 0.5
    low, high = low - pad, high + pad
    return low, high, sum(not (low <= min(point) and max(point) <= high) for point in points)


@cache
def _fallback_fonts() -> tuple[str, ...]:
    """Return those of FALLBACK_FONTS that are installed."""
    installed = {font.name for font in font_manager.fontManager.ttflist}
    return tuple(font for font in FALLBACK_FONTS if font in installed)


@cache
def _fonts() -> tuple[FT2Font, ...]:
    names = ("DejaVu Sans", *_fallback_fonts())
    return tuple(FT2Font(font_manager.findfont(name)) for name in names)


def _printable(text: str, max_chars: int | None = None) -> str:
    """Replace characters that no font here has by their numbers, which can be looked up; then cut the text."""
    shown = "".join(
        each if each == "\n" or any(font.get_char_index(ord(each)) for font in _fonts()) else f"U+{ord(each):04X}"
        for each in text
    )
    return shown if max_chars is None or len(shown) <= max_chars else f"{shown[: max_chars - 1]}\u2026"
