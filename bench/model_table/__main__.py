"""Measure models of published shapes beside mlx_lm, its server and llama.cpp; write a table of several machines.

    python -m bench.models [--shapes qwen3-0.6b ...] [--bits 4 32] [--prompt 512] [--tokens 64] [--runs 3]
    python -m bench.models --merge results/models-*.json

Shapes for Macs are not among the default ones: `--shapes qwen3-8b llama3.1-8b --bits 4`. Weights are random, so that
nothing is downloaded; a checkpoint is made once in build/bench and deleted with --remove.
"""

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from msgspec import structs

from bench import llama_cpp
from bench.compare import parse_arguments
from bench.model_table import shapes, table
from bench.model_table.measure import Row, Sizes, measure

_RESULTS = Path(__file__).parents[1] / "results"
_FIT = ("qwen2.5-0.5b", "qwen3-0.6b", "gemma3-1b", "llama3.2-1b", "qwen2.5-1.5b", "smollm2-1.7b", "qwen3-1.7b")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=shapes.SHAPES, default=_FIT, metavar="SHAPE")
    parser.add_argument("--bits", type=int, nargs="+", choices=(4, 32), default=[4, 32], help="32: unquantised")
    parser.add_argument("--prompt", type=int, default=512, help="tokens (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="generated ones (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="measured runs (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="cores for each system (default: all)")
    parser.add_argument(
        "--beside",
        nargs="*",
        choices=table.PEERS,
        default=_installed(),
        metavar="PEER",
        help="one at a time; none if the model fits into memory only once (default: %(default)s)",
    )
    parser.add_argument("--machine", default=_machine(), help="its name in the table (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of the files (default: bench/results)")
    parser.add_argument("--remove", action="store_true", help="delete each checkpoint after its row")
    parser.add_argument("--merge", type=Path, nargs="+", help="measure nothing: write the page from these files")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to check that everything works")
    arguments = parse_arguments(parser)
    if arguments.quick:
        arguments.shapes, arguments.bits = ["tiny"], [4, 32]
        arguments.prompt, arguments.tokens, arguments.runs = 64, 8, 1
    if arguments.merge is None:
        sizes = Sizes(arguments.prompt, arguments.tokens, arguments.runs)
        for name in arguments.shapes:
            for bits in arguments.bits:
                row, backend = measure(name, 4 if bits == 4 else None, sizes, arguments.beside)
                _save(arguments.out, arguments.machine, backend, row)
                if arguments.remove:
                    shapes.remove(shapes.checkpoint(name, 4 if bits == 4 else None))
    files = arguments.merge or sorted(arguments.out.glob("models-*.json"))
    page = table.render(table.load(files))
    (arguments.out / "models.md").write_text(page)
    print(page)


def _save(folder: Path, machine: str, backend: str, row: Row) -> None:
    """Add a row to the machine's file, so that what was measured stays if a later model fails."""
    names = ("mlx", "mlx-lm", *(["llama-cpp-python"] if "llama.cpp" in row.beside else []))
    versions = {name: version(name) for name in names}
    command = " ".join(["python -m bench.models", *sys.argv[1:]])
    date = datetime.now(UTC).date().isoformat()
    results = table.Results(machine, backend, versions, date, [structs.replace(row, command=command)])
    print(f"{row.shape} {row.bits} bits -> {table.save(folder, results)}", file=sys.stderr, flush=True)


def _installed() -> list[str]:
    return [peer for peer in table.PEERS if peer != "llama.cpp" or llama_cpp.IS_INSTALLED]


def _machine() -> str:
    """Name the machine by its memory and cores."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{sys.platform}, {os.cpu_count()} cores, {memory_bytes / 2**30:.0f} GiB"


if __name__ == "__main__":
    main()
