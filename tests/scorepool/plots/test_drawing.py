"""Every kind of plot can be drawn of any data, as PNG, as SVG and in a terminal of any width. Warnings are errors."""

import io
import json
import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from scorepool.cli import app
from scorepool.plots import figures, plot_file, terminal
from scorepool.plots.statistics import Calibration, Comparison, Histogram, Statistic, TokenSeries

TOKENS = [
    "The",
    " fox",
    "\n",
    " 中文",
    "日本語",
    " שלום",
    " مرحبا",
    "$x_1$",
    " a_very_long_identifier_name",
    "\ufffd",
    "\u200b",
    "",
]


def comparison(pairs: list[tuple[float, float]]) -> Comparison:
    return Comparison.of(({"a_bits_per_byte": x, "b/c$_2_bits_per_byte": y} for x, y in pairs), None, None)


def calibration(rows: list[tuple[float, float]]) -> Calibration:
    found = Calibration()
    for row in rows:
        found.add(*row)
    return found


def tokens(number: int) -> TokenSeries:
    logprobs = [None, -9999.0, 0.0, *(-math.log(index + 2) for index in range(number))][:number]
    return TokenSeries(1, (TOKENS * number)[:number], logprobs)


DRAW = random.Random(0)
STATISTICS: dict[str, Statistic] = {
    "one": Histogram.of([{"perplexity": 12.5}], None),
    "equal": Histogram.of([{"perplexity": 1.0}] * 5, None),
    "huge": Histogram.of([{"perplexity": value} for value in (1.0, 3.0, 1e9, None)], None),
    "models": Histogram.of([{f"{name}_perplexity": 2.0 + index for index, name in enumerate("abcdefg")}], None),
    "tokens": tokens(12),
    "token": tokens(1),
    "many tokens": tokens(110),
    "calibrated": calibration([(DRAW.random(), 1.0) for _ in range(300)]),
    "one choice": calibration([(1.0, 0.0)]),
    "compared": comparison([(DRAW.random(), DRAW.random()) for _ in range(300)]),
    "hexagons": comparison([(DRAW.random(), DRAW.gauss(1, 0.1)) for _ in range(3000)] + [(1e9, 1.0)]),
    "one pair": comparison([(0.0, 0.0)]),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_a_picture_holds_a_plot(name: str, tmp_path: Path):
    figures.save(STATISTICS[name], tmp_path / "x.png", "model $x_1$")
    with Image.open(tmp_path / "x.png") as image:
        assert image.width >= 900
        assert len(image.getcolors(2**24) or ()) > 20
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]


def test_the_same_plot_is_the_same_svg(tmp_path: Path):
    for name in ("a.svg", "b.svg"):
        figures.save(STATISTICS["tokens"], tmp_path / name, "demo")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_axes_have_units():
    for name, labels in {
        "huge": {"perplexity per token", "rows"},
        "calibrated": {"probability of the picked choice", "accuracy (share of rows)", "rows"},
        "compared": {"a\nbits per byte", "b/c$_2\nbits per byte"},
    }.items():
        figure = Figure()
        figures.draw(STATISTICS[name], figure)
        found = {text for axes in figure.axes for text in (axes.get_xlabel(), axes.get_ylabel())}
        assert found - {""} == labels


def test_labels_of_tokens_do_not_overlap():
    figure = Figure(layout="constrained")
    figures.draw(STATISTICS["many tokens"], figure)
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [label.get_window_extent() for label in axes.get_yticklabels() if label.get_text()]
        tops = sorted((box.y0, box.y1) for box in boxes)
        assert all(upper[0] > lower[1] - 2 for lower, upper in pairwise(tops))


@pytest.mark.parametrize("width", [30, 80, 300])
@pytest.mark.parametrize("name", STATISTICS)
def test_a_terminal_of_any_width_shows_a_plot(name: str, width: int):
    out = io.StringIO()
    terminal.show(STATISTICS[name], "demo", Console(file=out, width=width, force_terminal=True, highlight=False))
    lines = out.getvalue().splitlines()
    assert len(lines) > 2
    assert "\x1b[30m" not in out.getvalue()  # black, which a dark terminal hides
    assert "\x1b[37m" not in out.getvalue()


def test_bars_are_as_long_as_their_numbers():
    out = io.StringIO()
    rows: list[dict[str, Any]] = [{"perplexity": 1.0}] * 10 + [{"perplexity": 2.0}] * 5
    terminal.show(Histogram.of(rows, None), "", Console(file=out, width=80))
    lengths = [line.count("\u2588") for line in out.getvalue().splitlines() if "\u2588" in line]
    assert lengths[0] == pytest.approx(2 * lengths[1], abs=1)


def test_the_command_draws_a_file(tmp_path: Path):
    path = tmp_path / "out.csv"
    path.write_text("perplexity,tokens,logprobs\n" + '2.0,"[""a""]","[-0.5]"\n' * 3)
    done = CliRunner().invoke(app, ["plot", str(path), "-o", "-", "-o", str(tmp_path / "x.svg"), "--title", "demo"])
    assert done.exit_code == 0, done.output
    assert "demo; 3 rows, 2" in done.output
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")
    done = CliRunner().invoke(app, ["plot", str(path), "--kind", "tokens", "--row", "3"])
    assert "row 3, 1 token, perplexity 1.65" in done.output
    done = CliRunner().invoke(app, ["plot", str(path), "--kind", "tokens", "--row", "4"])
    assert (done.exit_code, done.stderr) == (
        2,
        "scorepool: there is no row 4: expected --row from 1 to the number of rows\n",
    )


def test_a_row_that_cannot_be_read_is_named(tmp_path: Path):
    path = tmp_path / "scored.jsonl"
    path.write_text('{"perplexity": 1.5}\n{"perplexity": NaN}\n')
    done = CliRunner().invoke(app, ["plot", str(path)])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"scorepool: row 2 (line 2) of {path} cannot be read: ")


def test_a_file_is_drawn_in_each_format_that_is_written(tmp_path: Path):
    (tmp_path / "out.jsonl").write_text(json.dumps({"perplexity": None}) + "\n" + json.dumps({"perplexity": 3}))
    plot_file(tmp_path / "out.jsonl", [tmp_path / "x.PNG"])
    assert (tmp_path / "x.PNG").read_bytes().startswith(b"\x89PNG")
