"""Draw plots of a file that score, generate or compare wrote."""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import chain
from os import fspath
from pathlib import Path

from scorepool.files import BadInput, OutputError
from scorepool.files.formats.registry import Source, open_source
from scorepool.files.rows import Values
from scorepool.plots.statistics import KINDS, Calibration, Comparison, Histogram, Statistic, TokenSeries, kind_of

TERMINAL = ("-", "terminal")
ENDINGS = (".png", ".svg")


def check_targets(targets: Sequence[str | Path]) -> None:
    """Check that plots can be drawn there, before hours of work. Raises BadInput."""
    for target in targets:
        if target in TERMINAL:
            continue
        path = Path(target)
        if path.suffix.lower() not in ENDINGS:
            raise BadInput(
                f"the plot {path} is of no known format: expected PATH.png, PATH.svg or `-` for the terminal"
            )
        if not path.absolute().parent.is_dir():
            raise BadInput(f"the plot {path} cannot be written: there is no folder {path.absolute().parent}")


def plot_file(
    path: str | Path,
    targets: Sequence[str | Path],
    *,
    kind: str | None = None,
    column: str | None = None,
    row: int = 1,
    models: list[str] | None = None,
    title: str = "",
    input_format: str | None = None,
) -> None:
    """Draw one plot of a file's columns to each target: PATH.png, PATH.svg, or `-` for the terminal.

    `kind` is one of KINDS, by default the one that suits the columns. `column` is the quantity of a histogram (default:
    perplexity) or a comparison (default: bits_per_byte), `row` the row of which the tokens are drawn, and `models` the
    two that are compared. Raises FileError.
    """
    check_targets(targets)
    with open_source(fspath(path), input_format) as source:
        statistic = _statistic(_values(source), kind, column, row, models)
    for target in targets:
        if target in TERMINAL:
            import_module("scorepool.plots.terminal").show(statistic, title)
        else:
            _save(statistic, Path(target), title)


def _save(statistic: Statistic, path: Path, title: str) -> None:
    figures = import_module("scorepool.plots.figures")
    try:
        figures.save(statistic, path, title)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from None


def _values(source: Source) -> Iterator[Values]:
    """Yield rows. Raises BadInput for one that cannot be read: a plot without it would be wrong."""
    for row in source.rows:
        if row.values is None:
            raise BadInput(f"row {row.number} (line {row.line}) of {source.name} cannot be read: {row.reason}")
        yield row.values


def _statistic(
    rows: Iterator[Values], kind: str | None, column: str | None, row: int, models: list[str] | None
) -> Statistic:
    first = next(rows, None)
    if first is None:
        raise BadInput("there are no rows to plot")
    every = chain([first], rows)
    makers: dict[str, Callable[[], Statistic]] = {
        "histogram": lambda: Histogram.of(every, column),
        "tokens": lambda: TokenSeries.of(every, row),
        "calibration": lambda: Calibration.of(every),
        "comparison": lambda: Comparison.of(every, column, models),
    }
    chosen = kind or kind_of(first)
    if chosen not in makers:
        raise BadInput(f"the kind is {chosen!r}: expected one of {', '.join(KINDS)}")
    return makers[chosen]()
