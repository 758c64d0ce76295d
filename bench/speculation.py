"""Compare greedy generation with speculation and without it: where every proposed token is right, and where none is.

    python -m bench.speculation [--method draft] [--model 0.6b] [--threads 1] [--tokens 96] [--rows 1 4]

n-grams
    copying           the text repeats its prompt: every proposed token is accepted
    nothing accepted  any two tokens of the text stand in the prompt too, before a third that the model does not
                      generate: there is something to propose at every token, and it is wrong
draft, a model of four narrow layers with the same vocabulary
    copying           it knows the text: every proposed token is accepted
    nothing accepted  it is random

Both run on a model whose greedy text is known, a cycle of tokens, and which computes as much as any of its shape.
"""

import statistics
from collections.abc import Callable
from functools import partial
from random import Random

from bench import models
from bench.compare import Item, compare, make_parser, parse_arguments, print_comparison, print_header
from bench.generate import ScorepoolGenerate, Tokens, count_differing_rows
from bench.peers import open_engine

Draw = Callable[[int, Random], list[Item]]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--method", choices=["ngram", "draft"], default="ngram", help="what proposes tokens")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="batch sizes")
    parser.add_argument("--tokens", type=int, default=96, help="generated tokens of each row, fewer than a cycle")
    arguments = parse_arguments(parser)
    if arguments.quick:
        arguments.rows, arguments.tokens, arguments.runs = [2], 40, 1

    model = models.find_copying(arguments.model)
    drafts = {"copying": models.find_copying, "nothing accepted": models.find_random_draft}
    for title, draw in (("copying", draw_cycles), ("nothing accepted", draw_wrong_thirds)):
        settings: dict[str, str] = {"speculation": arguments.method}
        if arguments.method == "draft":
            settings["draft"] = str(drafts[title](models.draft_shape(arguments.model)).folder)
        measure(title, model, draw, settings, arguments.rows, arguments.tokens, arguments.runs)


def measure(
    title: str, model: models.Model, draw: Draw, settings: dict[str, str], rows: list[int], max_tokens: int, runs: int
) -> None:
    """Run one task in every batch size, without and with speculation in turns, and print the ratios of their speeds."""
    engines = {"off": open_engine(model.folder), "on": open_engine(model.folder, **settings)}
    systems: dict[str, Callable[[list[Item]], Tokens]] = {
        f"speculation {name}": ScorepoolGenerate(engine, max_tokens) for name, engine in engines.items()
    }
    for count in rows:
        print_header(f"{title}, {count} rows of {max_tokens} tokens", model.name, engines["off"].model_info.backend)
        before = engines["on"].stats
        measurements = compare(systems, partial(draw, count), runs)
        stats = engines["on"].stats
        print_comparison(measurements, count_differing_rows, count * max_tokens)
        off, on = ([timing.wall_s for timing in measured.timings] for measured in measurements.values())
        speed = statistics.median(one / other for one, other in zip(off, on, strict=True))
        proposed, accepted = (
            getattr(stats, name) - getattr(before, name) for name in ("proposed_tokens", "accepted_tokens")
        )
        print(f"tokens/s with speculation: {speed:.2f}x; {accepted} of {proposed} proposed tokens were accepted")
    for engine in engines.values():
        engine.close()


def draw_cycles(count: int, draw: Random) -> list[Item]:
    """Draw prompts of a cycle and a half, each with a start of its own."""
    length = models.CYCLE * 3 // 2
    return [Item([models.in_cycle(start + step) for step in range(length)], []) for start in _starts(count, draw)]


def draw_wrong_thirds(count: int, draw: Random) -> list[Item]:
    """Draw prompts that hold any two neighbours of the cycle before a token that does not follow them."""
    prompts = [
        [
            models.in_cycle(start + step + offset)
            for step in range(models.CYCLE)
            for offset in (0, 1, draw.randrange(3, 99))
        ]
        for start in _starts(count, draw)
    ]
    return [Item(prompt, []) for prompt in prompts]


def _starts(count: int, draw: Random) -> list[int]:
    return draw.choices(range(models.CYCLE), k=count)


if __name__ == "__main__":
    main()
