"""Whether cost grows linearly: time per scored token, by the length of one row and by the number of rows.

    python -m bench.linearity [--model 0.6b] [--threads 1] [--lengths 64 256 1024 4096] [--rows 1 2 4 8 16 32 64]

Writes a table and a plot into --out. No two rows share a prefix. Attention alone grows with the square of the length,
which tells at lengths where it is no longer small beside the weights' part.
"""

import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from matplotlib.figure import Figure

from bench import models
from bench.peers import Ours, open_engine
from bench.race import Row, conditions, draw_tokens, lap, options, parse

_ROW_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Point:
    """The cost of one size of work."""

    size: int
    num_scored: int
    cpu_s: float
    wall_s: float

    @property
    def cpu_ms_per_token(self) -> float:
        return self.cpu_s / self.num_scored * 1e3


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.set_defaults(model="wide")
    given = parse(parser)
    if given.quick:
        given.model, given.lengths, given.rows, given.runs = "demo", [16, 32], [1, 2], 1

    model = models.find(given.model)
    engine = open_engine(model.folder)
    draw = Random(0)

    def measure(size: int, num_rows: int, length: int) -> Point:
        laps = [
            lap(partial(Ours(engine), [_row(draw, length, model.vocab_size) for _ in range(num_rows)]))[0]
            for _ in range(given.runs)
        ]
        cpu_s, wall_s = (statistics.median(getattr(each, name) for each in laps) for name in ("cpu_s", "wall_s"))
        return Point(size, num_rows * (length - 1), cpu_s, wall_s)

    measure(0, 1, min(given.lengths))  # warms up
    by_length = [measure(length, 1, length) for length in given.lengths]
    by_rows = [measure(count, count, _ROW_LENGTH) for count in given.rows]
    engine.close()
    tables = {"tokens of one row": by_length, f"rows of {_ROW_LENGTH} tokens": by_rows}
    text = f"# Time per scored token\n\n{conditions(given.model, engine.model_info.backend)}\n"
    text += "".join(f"\n{table(name, points)}" for name, points in tables.items())
    print(f"\n{text}")
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"linearity-{given.model}.md").write_text(text)
    plot(given.out / f"linearity-{given.model}.png", tables)


def _row(draw: Random, length: int, vocab_size: int) -> Row:
    """All but its first token is scored."""
    return Row(draw_tokens(draw, 1, vocab_size), draw_tokens(draw, length - 1, vocab_size))


def table(size: str, points: list[Point]) -> str:
    """In Markdown. The ratio is to the first line: 1 is linear, below 1 is better."""
    lines = [f"| {size} | CPU s | wall s | CPU ms per token | ratio |", "|---:|---:|---:|---:|---:|"]
    for point in points:
        growth = point.cpu_ms_per_token / points[0].cpu_ms_per_token
        took = f"{point.cpu_s:.3f} | {point.wall_s:.3f} | {point.cpu_ms_per_token:.3f}"
        lines.append(f"| {point.size:,} | {took} | {growth:.2f}x |")
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
