"""Measure time per scored token by the length of one row and by the number of rows: constant if cost is linear.

    python -m bench.linearity [--model 0.6b] [--threads 1] [--lengths 64 256 1024 4096] [--rows 1 2 4 8 16 32 64]

Writes a table and a plot into --out. No two rows share a prefix. Attention alone grows with the square of the length;
it shows at lengths where it is no longer small compared with the matrix products of the weights.
"""

import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from matplotlib.figure import Figure

from bench import models
from bench.compare import Item, Timing, conditions, draw_tokens, make_parser, parse_arguments, time_call
from bench.peers import ScorepoolEngine, open_engine

_ROW_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Point:
    """The cost of one size."""

    size: int
    num_scored: int
    cpu_s: float
    wall_s: float

    @property
    def cpu_ms_per_token(self) -> float:
        return self.cpu_s / self.num_scored * 1e3


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024, 4096], help="tokens of one row")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="rows of 64 tokens")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of table and plot")
    parser.set_defaults(model="wide")
    arguments = parse_arguments(parser)
    if arguments.quick:
        arguments.model, arguments.lengths, arguments.rows, arguments.runs = "demo", [16, 32], [1, 2], 1

    model = models.find(arguments.model)
    engine = open_engine(model.folder)
    draw = Random(0)

    def measure(size: int, num_rows: int, length: int) -> Point:
        timings: list[Timing] = []
        for _ in range(arguments.runs):
            items = [draw_item(draw, length, model.vocab_size) for _ in range(num_rows)]
            timings.append(time_call(partial(ScorepoolEngine(engine), items))[0])
        cpu_s = statistics.median(timing.cpu_s for timing in timings)
        wall_s = statistics.median(timing.wall_s for timing in timings)
        return Point(size, num_rows * (length - 1), cpu_s, wall_s)

    measure(0, 1, min(arguments.lengths))  # warm-up
    by_length = [measure(length, 1, length) for length in arguments.lengths]
    by_rows = [measure(count, count, _ROW_LENGTH) for count in arguments.rows]
    engine.close()
    tables = {"tokens of one row": by_length, f"rows of {_ROW_LENGTH} tokens": by_rows}
    text = f"# Time per scored token\n\n{conditions(arguments.model, engine.model_info.backend)}\n"
    text += "".join(f"\n{table(name, points)}" for name, points in tables.items())
    print(f"\n{text}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"linearity-{arguments.model}.md").write_text(text)
    plot(arguments.out / f"linearity-{arguments.model}.png", tables)


def draw_item(draw: Random, length: int, vocab_size: int) -> Item:
    """Draw an item of which every token but the first is scored."""
    return Item(draw_tokens(draw, 1, vocab_size), draw_tokens(draw, length - 1, vocab_size))


def table(size: str, points: list[Point]) -> str:
    """Format a Markdown table. Ratios are relative to the first line: 1 is linear, below 1 is better."""
    lines = [f"| {size} | CPU s | wall s | CPU ms per token | ratio |", "|---:|---:|---:|---:|---:|"]
    for point in points:
        ratio = point.cpu_ms_per_token / points[0].cpu_ms_per_token
        figures = f"{point.cpu_s:.3f} | {point.wall_s:.3f} | {point.cpu_ms_per_token:.3f}"
        lines.append(f"| {point.size:,} | {figures} | {ratio:.2f}x |")
    return "\n".join(lines) + "\n"


def plot(path: Path, tables: dict[str, list[Point]]) -> None:
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axes, (name, points) in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables.items(), strict=True):
        axes.plot([point.size for point in points], [point.cpu_ms_per_token for point in points], marker="o")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(name)
        axes.set_ylabel("CPU ms per scored token")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
