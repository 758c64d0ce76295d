"""Compare the rate of generating rows beside one that follows a grammar with their rate beside one that does not.

    python -m bench.constrained [--rows 1 8 31] [--tokens 128] [--threads 1]

The row beside them generates all the time: an array of integers, whose grammar is asked before each token. Every run
takes both in turns.
"""

import statistics
import time
from random import Random

from bench import models
from bench.compare import draw_tokens, make_parser, median_ratio, parse_arguments, print_header
from bench.peers import open_engine
from scorepool.engine import Engine, Sampling, Sequence
from scorepool.engine.text.chat.grammar import StructuredOutputSpec

_PROMPT = 32  # tokens
_TIMES_LONGER = 8  # the row beside the others
_SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 100_000}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 31], help="numbers of rows without a grammar")
    parser.add_argument("--tokens", type=int, default=128, help="generated tokens of each row")
    arguments = parse_arguments(parser)
    if arguments.quick:
        arguments.rows, arguments.tokens, arguments.runs = [2], 16, 1
    model = models.find(arguments.model)
    engine = open_engine(model.folder)
    draw = Random(0)
    print_header("Generation beside one row with a grammar", arguments.model, engine.model_info.backend)
    for num_rows in arguments.rows:
        free: list[float] = []
        constrained: list[float] = []
        num_pauses = 0
        for _ in range(arguments.runs + 1):  # the first one warms up
            rates, beside = [], [new_row(engine, draw, arguments.tokens * _TIMES_LONGER) for _ in range(2)]
            constrain(engine, beside[1])
            for row in beside:
                rates.append(rate_beside(engine, draw, row, num_rows, arguments.tokens))
            free.append(rates[0])
            constrained.append(rates[1])
            num_pauses += beside[1].num_pauses
        ratio = median_ratio(constrained[1:], free[1:])
        print(
            f"{num_rows:3} rows: beside a free row {statistics.median(free[1:]):7,.0f} tokens/s, beside a constrained "
            f"row {statistics.median(constrained[1:]):7,.0f}, ratio {ratio:.2f}x; it sat out {num_pauses} steps",
            flush=True,
        )
    engine.close()


def rate_beside(engine: Engine, draw: Random, beside: Sequence, num_rows: int, num_tokens: int) -> float:
    """Return the tokens per second of rows that generate beside another one."""
    rows = [new_row(engine, draw, num_tokens) for _ in range(num_rows)]
    other = engine.add([beside])
    while not beside.num_generated:
        time.sleep(0.001)
    started = time.perf_counter()
    engine.add(rows).result()
    wall_s = time.perf_counter() - started
    engine.cancel(other)
    return num_rows * num_tokens / wall_s


def new_row(engine: Engine, draw: Random, num_tokens: int) -> Sequence:
    sampling = Sampling(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    return Sequence(token_ids=draw_tokens(draw, _PROMPT, engine.model_info.vocab_size), sampling=sampling)


def constrain(engine: Engine, row: Sequence) -> None:
    """Give a row the grammar, and wait until it is compiled."""
    spec = StructuredOutputSpec(json_schema=_SCHEMA)
    (constraint,) = engine.chat.grammar_compiler.constraints(spec, None)
    constraint.compile().result()
    row.constraint = constraint


if __name__ == "__main__":
    main()
