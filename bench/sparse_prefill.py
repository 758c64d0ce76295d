"""Compare the time to the first token of a long prompt: all of it prefilled, and the part that a draft model chooses.

    python -m bench.sparse_prefill [--model 0.6b] [--threads 1] [--tokens 8192] [--keep 20] [--runs 5]

The draft model has four narrow layers and the same vocabulary, and reads the whole prompt. All weights are random: the
times are those of the shapes, and what a text loses cannot be seen. Only the first token is timed; later ones come
sooner too, since fewer keys are read.
"""

from collections.abc import Callable
from functools import partial
from random import Random

from bench import models
from bench.compare import Item, compare, draw_tokens, make_parser, median_ratio, parse_arguments, print_header
from bench.peers import open_engine
from scorepool.engine import Engine, Sampling, Sequence


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt (default: %(default)s)")
    parser.add_argument("--keep", type=float, nargs="+", default=[20.0], help="percent that is kept (default: 20)")
    arguments = parse_arguments(parser)
    if arguments.quick:
        arguments.tokens, arguments.runs = 512, 1
    model = models.find_copying(arguments.model)
    draft = models.find_random_draft(models.draft_shape(arguments.model))
    engine = open_engine(model.folder, speculation="draft", draft=str(draft.folder))
    systems: dict[str, Callable[[list[Item]], list[int]]] = {"whole prompt": partial(first_tokens, engine, None)}
    systems |= {f"{keep:g} % of it": partial(first_tokens, engine, keep) for keep in arguments.keep}
    print_header(f"first token after {arguments.tokens:,} tokens", model.name, engine.model_info.backend)
    measurements = compare(systems, partial(draw_prompt, arguments.tokens, model.vocab_size), arguments.runs)
    whole = [timing.wall_s for timing in measurements["whole prompt"].timings]
    print(f"{'':16} {'kept':>7} {'wall s of each run':40} median ratio of the time to the first token")
    for name, measured in measurements.items():
        wall = [timing.wall_s for timing in measured.timings]
        runs = " ".join(f"{seconds:.2f}" for seconds in wall)
        print(f"{name:16} {measured.results[-1]:7,} {runs:40} {median_ratio(whole, wall):.2f}x sooner", flush=True)
    engine.close()


def draw_prompt(num_tokens: int, vocab_size: int, draw: Random) -> list[Item]:
    return [Item(draw_tokens(draw, num_tokens, vocab_size), [])]


def first_tokens(engine: Engine, keep_pct: float | None, items: list[Item]) -> list[int]:
    """Generate one token after each prompt. Return how many tokens of each went through the model."""
    sampling = Sampling(max_tokens=1, temperature=0)
    sequences = [Sequence(token_ids=list(item.prompt), sampling=sampling, keep_pct=keep_pct) for item in items]
    engine.add(sequences).result()
    return [sequence.num_input_tokens - sequence.num_left_out for sequence in sequences]


if __name__ == "__main__":
    main()
