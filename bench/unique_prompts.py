"""Score prompts of mixed lengths that share nothing, with one completion each.

    python -m bench.unique_prompts [--model 0.6b --rows 4] [--threads 1] [--shortest 64] [--longest 1024]

The peers run one row at a time and so compute no padding.
"""

from random import Random

from bench import llama_cpp, models
from bench.compare import (
    Item,
    Scorer,
    compare,
    describe,
    draw_tokens,
    make_parser,
    max_difference,
    num_tokens,
    parse_arguments,
    print_comparison,
    print_header,
)
from bench.llama_cpp import LlamaCpp
from bench.peers import Evaluate, FullLogits, ScorepoolEngine, Transformers, load_mlx, open_engine


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=12, help="how many prompts")
    parser.add_argument("--shortest", type=int, default=64, help="tokens of the shortest prompt with its completion")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest prompt with its completion")
    parser.add_argument("--completion", type=int, default=16, help="tokens of each completion")
    arguments = parse_arguments(parser)
    if arguments.quick:
        arguments.rows, arguments.longest, arguments.runs = 3, 96, 1

    model = models.find(arguments.model)
    lengths = geometric_lengths(arguments.shortest, arguments.longest, arguments.rows)

    def draw(random: Random) -> list[Item]:
        return draw_items(random, lengths, arguments.completion, model.vocab_size)

    items = draw(Random(0))
    engine = open_engine(model.folder)
    mlx_model, _ = load_mlx(model.folder)
    title = f"Unique prompts, {describe(items)}, lengths {lengths}"
    print_header(title, arguments.model, engine.model_info.backend)
    systems: dict[str, Scorer] = {
        "scorepool engine": ScorepoolEngine(engine),
        "mlx_lm.evaluate": Evaluate(mlx_model),
        "transformers, logits_to_keep": Transformers.load(model.folder, rows_at_once=1),
        "mlx, full logits": FullLogits(mlx_model, rows_at_once=1),
    }
    if llama_cpp.IS_INSTALLED:
        systems["llama.cpp"] = LlamaCpp(model.folder, rows_at_once=1)
    if arguments.exact:
        systems["scorepool engine, exact"] = ScorepoolEngine(open_engine(model.folder, mode="exact"))
    print_comparison(compare(systems, draw, arguments.runs), max_difference, num_tokens(items))
    engine.close()


def geometric_lengths(shortest: int, longest: int, count: int) -> list[int]:
    """Return lengths that grow by a constant factor, shuffled."""
    factor = (longest / shortest) ** (1 / max(1, count - 1))
    lengths = [round(shortest * factor**number) for number in range(count)]
    Random(0).shuffle(lengths)
    return lengths


def draw_items(draw: Random, lengths: list[int], completion: int, vocab_size: int) -> list[Item]:
    return [
        Item(draw_tokens(draw, length - completion, vocab_size), draw_tokens(draw, completion, vocab_size))
        for length in lengths
    ]


if __name__ == "__main__":
    main()
