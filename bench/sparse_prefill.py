"""Compare the time to the first token of a long prompt: all of it prefilled, and the part that a draft model chooses.

    python -m bench.sparse_prefill [--model 0.6b] [--threads 1] [--tokens 8192] [--keep 20] [--runs 5]

The draft model has four narrow layers and the same vocabulary, and reads the whole prompt. All weights are random: the
times are those of the shapes, and what a text loses cannot be seen. Only the first token is timed; later ones come
sooner too, since fewer keys are read.
"""

from functools import partial
from random import Random

from bench import models
from bench.compare import Timing, draw_tokens, make_parser, median_ratio, parse_arguments, print_header, time_call
from bench.peers import open_engine
from scorepool.engine import Engine, Sampling, Sequence

WARM_UP_TOKENS = 512


def main() -> None:
    parser = make_parser(__doc__, runs=3)
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt (default: %(default)s)")
    parser.add_argument("--keep", type=float, nargs="+", default=[20.0], help="percent that is kept (default: 20)")
    arguments = parse_arguments(parser)
    if arguments.quick:
        arguments.tokens, arguments.runs = 512, 1
    model = models.find_copying(arguments.model)
    draft = models.find_random_draft(models.draft_shape(arguments.model))
    engine = open_engine(model.folder, speculation="draft", draft=str(draft.folder))
    print_header(f"first token after {arguments.tokens:,} tokens", model.name, engine.model_info.backend)
    timings: dict[float | None, list[Timing]] = {keep_pct: [] for keep_pct in (None, *arguments.keep)}
    kept: dict[float | None, int] = {}
    for number in range(arguments.runs + 1):  # the first one warms up
        num_tokens = arguments.tokens if number else WARM_UP_TOKENS
        prompt = draw_tokens(Random(number), num_tokens, model.vocab_size)
        for keep_pct, measured in timings.items():
            timing, kept[keep_pct] = time_call(partial(first_token, engine, prompt, keep_pct))
            measured += [timing] * bool(number)
    print_ratios(timings, kept)
    engine.close()


def first_token(engine: Engine, prompt: list[int], keep_pct: float | None) -> int:
    """Generate one token. Return how many tokens of the prompt went through the model."""
    sequence = Sequence(token_ids=list(prompt), sampling=Sampling(max_tokens=1, temperature=0), keep_pct=keep_pct)
    engine.add([sequence]).result()
    return sequence.num_input_tokens - sequence.num_left_out


def print_ratios(timings: dict[float | None, list[Timing]], kept: dict[float | None, int]) -> None:
    """Print the median time of each way, and how much sooner it is than the whole prompt."""
    print(
        f"{'':16} {'kept':>7}   wall s of each run | CPU s of each run; median ratios of the whole prompt's time to it"
    )
    wall, cpu = ([getattr(timing, name) for timing in timings[None]] for name in ("wall_s", "cpu_s"))
    for keep_pct, measured in timings.items():
        name = "whole prompt" if keep_pct is None else f"{keep_pct:g} % of it"
        walls, cpus = [timing.wall_s for timing in measured], [timing.cpu_s for timing in measured]
        runs = " | ".join(" ".join(f"{seconds:.2f}" for seconds in each) for each in (walls, cpus))
        ratios = f"{median_ratio(wall, walls):.2f}x sooner, {median_ratio(cpu, cpus):.2f}x less CPU"
        print(f"{name:16} {kept[keep_pct]:7,}   {runs}; {ratios}", flush=True)


if __name__ == "__main__":
    main()
