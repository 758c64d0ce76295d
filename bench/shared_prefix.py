"""Score many completions of one prompt, as reinforcement learning and multiple choice do.

    python -m bench.shared_prefix [--model 0.6b] [--threads 1] [--prompt 128] [--completions 8]

A system that computes the shared prompt again for every completion does most of its work more than once.
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
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the shared prompt")
    parser.add_argument("--completions", type=int, default=8, help="how many completions are scored")
    parser.add_argument(
        "--longest", type=int, default=16, help="tokens of the longest completion; the shortest has 5/8 of them"
    )
    arguments = parse_arguments(parser)
    if arguments.quick:
        arguments.prompt, arguments.completions, arguments.runs = 16, 3, 1

    model = models.find(arguments.model)

    def draw(random: Random) -> list[Item]:
        return draw_items(random, arguments.prompt, arguments.completions, arguments.longest, model.vocab_size)

    items = draw(Random(0))
    engine = open_engine(model.folder)
    mlx_model, _ = load_mlx(model.folder)
    print_header(f"Shared prefix, {describe(items)}", arguments.model, engine.model_info.backend)
    systems: dict[str, Scorer] = {
        "scorepool engine": ScorepoolEngine(engine),
        "mlx_lm.evaluate": Evaluate(mlx_model),
        "transformers, logits_to_keep": Transformers.load(model.folder, rows_at_once=len(items)),
        "mlx, full logits": FullLogits(mlx_model, rows_at_once=len(items)),
    }
    if llama_cpp.IS_INSTALLED:
        systems["llama.cpp"] = LlamaCpp(model.folder, rows_at_once=len(items))
    if arguments.exact:
        systems["scorepool engine, exact"] = ScorepoolEngine(open_engine(model.folder, mode="exact"))
    print_comparison(compare(systems, draw, arguments.runs), max_difference, num_tokens(items))
    engine.close()


def draw_items(draw: Random, prompt: int, completions: int, longest: int, vocab_size: int) -> list[Item]:
    shared = draw_tokens(draw, prompt, vocab_size)
    lengths = [max(1, longest - number % 4 * (longest // 8)) for number in range(completions)]
    return [Item(shared, draw_tokens(draw, length, vocab_size)) for length in lengths]


if __name__ == "__main__":
    main()
