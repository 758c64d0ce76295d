"""Compare rows of LoRA adapters and of none in one batch with the same rows in a batch per adapter, and row by row.

    python -m bench.adapters [--model wide] [--threads 1] [--rows 32] [--adapters 4] [--rank 8] [--tokens 32]

base alone    all rows without an adapter, in one batch
mixed         the rows in one batch, with adapters in turns: low-rank products gathered per row
grouped       one batch per adapter, one after another: what a batch without gathered products would do
one by one    each row alone

Adapters change all attention projections, with random weights. The first system's tokens are those of the base.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import mlx.core as mx

from bench import models
from bench.compare import (
    Item,
    compare,
    draw_tokens,
    make_parser,
    parse_arguments,
    print_comparison,
    print_header,
)
from bench.generate import Tokens, count_differing_rows, generated, to_generate
from bench.peers import open_engine
from scorepool.engine import Engine

PROMPT = 32  # tokens
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=32, help="rows of each run")
    parser.add_argument("--adapters", type=int, default=4, help="adapters beside the base model")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="generated tokens of each row")
    arguments = parse_arguments(parser)
    if arguments.quick:
        arguments.rows, arguments.tokens, arguments.runs = 6, 4, 1
    model, num_rows = models.find(arguments.model), arguments.rows

    def draw(random: Random) -> list[Item]:
        return [Item(draw_tokens(random, PROMPT, model.vocab_size), []) for _ in range(num_rows)]

    with TemporaryDirectory() as folder:
        saved = [Path(folder) / f"a{seed}" for seed in range(arguments.adapters)]
        for seed, path in enumerate(saved):
            save(model.folder, path, arguments.rank, seed)
        engine = open_engine(model.folder, adapters=tuple((path.name, str(path)) for path in saved))
        names = [None, *(path.name for path in saved)]
        run = partial(generate, engine, arguments.tokens)
        systems: dict[str, Callable[[list[Item]], Tokens]] = {
            "base alone": lambda items: run(items, [None], [range(len(items))]),
            "mixed": lambda items: run(items, names, [range(len(items))]),
            "grouped": lambda items: run(
                items, names, [range(first, len(items), len(names)) for first in range(len(names))]
            ),
            "one by one": lambda items: run(items, names, [[row] for row in range(len(items))]),
        }
        title = f"{num_rows} rows of {arguments.tokens} tokens, {len(saved)} adapters of rank {arguments.rank}"
        print_header(title, model.name, engine.model_info.backend)
        measurements = compare(systems, draw, arguments.runs)
        print_comparison(measurements, count_differing_rows, num_rows * arguments.tokens)
        engine.close()


def generate(
    engine: Engine,
    max_tokens: int,
    items: list[Item],
    names: Sequence[str | None],
    groups: Sequence[Sequence[int]],
) -> Tokens:
    """Generate the rows of each group in one batch, one group after another; rows have the adapters in turns."""
    sequences = to_generate(items, max_tokens)
    for row, sequence in enumerate(sequences):
        sequence.adapter_name = names[row % len(names)]
    for group in groups:
        if group:
            engine.add([sequences[row] for row in group]).result()
    return [generated(sequence) for sequence in sequences]


def save(base: Path, folder: Path, rank: int, seed: int) -> None:
    """Save an adapter of random weights as peft does."""
    mx.random.seed(seed)
    tensors: dict[str, mx.array] = {}
    for file in sorted(base.glob("model*.safetensors")):
        stored: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
        for name, weight in stored.items():
            path = name.removesuffix(".weight")
            if path.endswith(TARGETS) and name.endswith(".weight"):
                (num_out, num_in), prefix = weight.shape, f"base_model.model.{path}"
                tensors[f"{prefix}.lora_A.weight"] = 0.05 * mx.random.normal((rank, num_in))
                tensors[f"{prefix}.lora_B.weight"] = 0.05 * mx.random.normal((num_out, rank))
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(TARGETS)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
