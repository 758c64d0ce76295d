"""Prompts of mixed lengths that have nothing in common, a completion each.

    python -m bench.unique_prompts [--model 0.6b --rows 4] [--threads 1] [--shortest 64] [--longest 1024]

The peers take one row at a time, which costs them no padding.
"""

from random import Random

from bench import models
from bench.peers import Evaluate, FullLogits, Ours, Transformers, load_mlx, open_engine
from bench.race import Row, Scorer, announce, describe, draw_tokens, nats, num_tokens, options, parse, race, report


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--shortest", type=int, default=64, help="tokens of prompt and completion together")
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--completion", type=int, default=16, help="of them scored")
    given = parse(parser)
    if given.quick:
        given.rows, given.longest, given.runs = 3, 96, 1

    model = models.find(given.model)
    lengths = spread(given.shortest, given.longest, given.rows)

    def draw(random: Random) -> list[Row]:
        return draw_rows(random, lengths, given.completion, model.vocab_size)

    rows = draw(Random(0))
    engine = open_engine(model.folder)
    mlx_model, _ = load_mlx(model.folder)
    announce(f"Unique prompts, {describe(rows)}, lengths {lengths}", given.model, engine.model_info.backend)
    contestants: dict[str, Scorer] = {
        "scorepool engine": Ours(engine),
        "mlx_lm.evaluate": Evaluate(mlx_model),
        "transformers, logits_to_keep": Transformers.load(model.folder, rows_at_once=1),
        "mlx, full logits": FullLogits(mlx_model, rows_at_once=1),
    }
    if given.exact:
        contestants["scorepool engine, exact"] = Ours(open_engine(model.folder, mode="exact"))
    report(race(contestants, draw, given.runs), nats, num_tokens(rows))
    engine.close()


def spread(shortest: int, longest: int, count: int) -> list[int]:
    """Each longer than the one before by the same factor, in an order that is not sorted."""
    factor = (longest / shortest) ** (1 / max(1, count - 1))
    lengths = [round(shortest * factor**number) for number in range(count)]
    Random(0).shuffle(lengths)
    return lengths


def draw_rows(draw: Random, lengths: list[int], completion: int, vocab_size: int) -> list[Row]:
    return [
        Row(draw_tokens(draw, length - completion, vocab_size), draw_tokens(draw, completion, vocab_size))
        for length in lengths
    ]


if __name__ == "__main__":
    main()
