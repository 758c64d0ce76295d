"""Many completions of one prompt, which is how RL and multiple choice score.

    python -m bench.shared_prefix [--model 0.6b] [--threads 1] [--prompt 128] [--completions 8]

The prompt's tokens, shared by all rows, are most of the work of whoever computes them again for each completion.
"""

from random import Random

from bench import models
from bench.peers import Evaluate, FullLogits, Ours, Transformers, load_mlx, open_engine
from bench.race import Row, Scorer, announce, describe, draw_tokens, nats, num_tokens, options, parse, race, report


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the one prompt")
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--longest", type=int, default=16, help="tokens of the longest completion; the shortest: 5/8")
    given = parse(parser)
    if given.quick:
        given.prompt, given.completions, given.runs = 16, 3, 1

    model = models.find(given.model)

    def draw(random: Random) -> list[Row]:
        return draw_rows(random, given.prompt, given.completions, given.longest, model.vocab_size)

    rows = draw(Random(0))
    engine = open_engine(model.folder)
    mlx_model, _ = load_mlx(model.folder)
    announce(f"Shared prefix, {describe(rows)}", given.model, engine.model_info.backend)
    contestants: dict[str, Scorer] = {
        "scorepool engine": Ours(engine),
        "mlx_lm.evaluate": Evaluate(mlx_model),
        "transformers, logits_to_keep": Transformers.load(model.folder, rows_at_once=len(rows)),
        "mlx, full logits": FullLogits(mlx_model, rows_at_once=len(rows)),
    }
    if given.exact:
        contestants["scorepool engine, exact"] = Ours(open_engine(model.folder, mode="exact"))
    report(race(contestants, draw, given.runs), nats, num_tokens(rows))
    engine.close()


def draw_rows(draw: Random, prompt: int, completions: int, longest: int, vocab_size: int) -> list[Row]:
    shared = draw_tokens(draw, prompt, vocab_size)
    lengths = [max(1, longest - number % 4 * (longest // 8)) for number in range(completions)]
    return [Row(shared, draw_tokens(draw, length, vocab_size)) for length in lengths]


if __name__ == "__main__":
    main()
