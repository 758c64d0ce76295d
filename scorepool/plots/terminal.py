"""Draw statistics on stdout with rich, which knows the terminal's width, its colours and wide characters.

Colours are the terminal's own foreground and its blue, so that light and dark themes can be read.
"""

from collections.abc import Sequence
from functools import singledispatch

from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from scorepool.plots.labels import UNITS, caption, number_text, show_token
from scorepool.plots.statistics import Calibration, Comparison, Histogram, Statistic, TokenSeries

MAX_WIDTH = 100  # cells: wider bars are not easier to read
NUM_BINS = 15
NUM_CELLS = 32  # of a comparison: columns; half as many lines, because cells are twice as high as wide
SHADES = " \u00b7\u2591\u2592\u2593\u2588"
TOKEN_CELLS = 20


def show(statistic: Statistic, title: str, console: Console | None = None) -> None:
    """Print a statistic."""
    console = console or Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    console.print(Text(caption(statistic, title)))
    console.print(draw(statistic))


@singledispatch
def draw(statistic: Statistic) -> RenderableType:
    """Return what is printed."""
    raise TypeError(type(statistic))


@draw.register
def _histogram(statistic: Histogram) -> RenderableType:
    edges = statistic.edges(NUM_BINS)
    table = _table((UNITS.get(statistic.quantity, statistic.quantity), "right"))
    counts = {model: sketch.histogram(edges) for model, sketch in statistic.series.items()}
    highest = max(map(max, counts.values()))
    for model in counts:
        table.add_column(Text(model or "rows"), justify="right", no_wrap=True)
        table.add_column("", ratio=1)
    for index in range(NUM_BINS):
        cells: list[RenderableType] = [f"{number_text(edges[index], 4)} \u2013 {number_text(edges[index + 1], 4)}"]
        for model in counts:
            cells += [number_text(counts[model][index]), _bar(counts[model][index], highest)]
        table.add_row(*cells)
    return table


@draw.register
def _tokens(statistic: TokenSeries) -> RenderableType:
    table = _table(("token", "left"), ("logprob (nats)", "right"))
    table.add_column("", ratio=1)
    lowest = min((each for each in statistic.logprobs if each is not None), default=-1.0)
    for token, logprob in zip(statistic.tokens, statistic.logprobs, strict=True):
        value = "none" if logprob is None else f"{logprob:.3f}"
        table.add_row(Text(show_token(token, TOKEN_CELLS)), value, _bar(-(logprob or 0.0), min(-lowest, 20.0)))
    return table


@draw.register
def _calibration(statistic: Calibration) -> RenderableType:
    table = _table(("probability", "left"), ("rows", "right"), ("accuracy", "right"), ("95 %", "right"))
    table.add_column("accuracy from 0 to 1", ratio=1)
    number = len(statistic.counts)
    for index, count in enumerate(statistic.counts):
        name = f"{index / number:.1f}\u2013{(index + 1) / number:.1f}"
        if not count:
            table.add_row(name, "0", "", "", "")
            continue
        accuracy, (low, high) = statistic.num_correct[index] / count, statistic.interval(index)
        cells = (name, number_text(count), f"{accuracy:.3f}", f"{low:.2f}\u2013{high:.2f}")
        table.add_row(*cells, _bar(accuracy, 1.0))
    return table


@draw.register
def _comparison(statistic: Comparison) -> RenderableType:
    values = [value for point in statistic.points for value in point]
    low, high = min(values), max(values)
    width = high - low or 1.0
    lines = NUM_CELLS // 2
    counts = [[0] * NUM_CELLS for _ in range(lines)]
    for first, second in statistic.points:
        across = min(int((first - low) / width * NUM_CELLS), NUM_CELLS - 1)
        up = min(int((second - low) / width * lines), lines - 1)
        counts[lines - 1 - up][across] += 1
    highest = max(map(max, counts))
    drawn = [_shaded(row, highest, lines - 1 - index) for index, row in enumerate(counts)]
    unit = UNITS.get(statistic.quantity, statistic.quantity)
    text = Text(f"{statistic.models[1]}, {unit}, up to {number_text(high)}\n")
    text.append("\n".join(f"\u2502{line}" for line in drawn), style="bold")
    text.append("\n\u2514" + "\u2500" * NUM_CELLS)
    text.append(f"\n{number_text(low)} to {number_text(high)}: {statistic.models[0]}, {unit}; / equal")
    return text


def _shaded(counts: Sequence[int], highest: int, up: int) -> str:
    """Return a line of the plane, in which `/` marks equal values where no rows are."""
    shades = "".join(SHADES[-(-count * (len(SHADES) - 1) // highest)] for count in counts)
    return "".join("/" if shade == " " and index // 2 == up else shade for index, shade in enumerate(shades))


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, expand=True, pad_edge=False, header_style="bold")
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True, overflow="fold")  # type: ignore[arg-type]
    return table


def _bar(value: float, highest: float) -> Bar:
    return Bar(max(highest, 1e-9), 0, min(value, highest), color="blue", bgcolor="default")
