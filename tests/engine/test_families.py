"""Families of the survey have transformers' numbers in every way in which the engine runs rows.

That is alone, in a padded batch, in chunks, with a shared prompt, and generated beside others.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random

import mlx.core as mx
import pytest

from scorepool.engine import Engine, Sampling, Sequence
from scorepool.engine.model import kv_cache
from scorepool.engine.model.load import load_checked
from survey.families import FAMILIES
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_tokenizer import BOS

BATCHED = [
    *("deepseek_v32", "falcon_mamba", "gemma2", "gemma3n", "gpt2", "gpt_bigcode", "jamba", "llama4", "llama4_text"),
    *("mamba", "mimo_v2_flash", "minicpm3", "ministral3", "nanochat", "nemotron_h", "olmo_hybrid", "recurrent_gemma"),
]
SEQUENTIAL = ["minimax_m3_vl"]
CASES = [
    (name, base, mode)
    for name in [*BATCHED, *SEQUENTIAL]
    for base in FAMILIES[name].bases()
    for mode in ("default", "exact")
]
SOAK = {  # slow cases in exact mode, each beside one with the same kind of cache
    *(("gemma2", "base"), ("deepseek_v32", "base"), ("llama4", "base"), ("gpt2", "base"), ("mamba", "base")),
    *(("nemotron_h", "base"), ("ministral3", "base"), ("minicpm3", "base"), ("mimo_v2_flash", "base")),
    *(("deepseek_v32", "plain_rope"), ("falcon_mamba", "base"), ("gemma2", "long_window"), ("gemma3n", "base")),
    *(("gpt_bigcode", "base"), ("jamba", "experts"), ("llama4_text", "base"), ("llama4_text", "no_rope")),
    *(("nemotron_h", "grouped"), ("nemotron_h", "latent"), ("olmo_hybrid", "base")),
}


def tokens(length: int, seed: int) -> list[int]:
    draw = Random(seed)
    return [BOS] + [draw.randrange(3, VOCAB_SIZE) for _ in range(length - 1)]


def generating(length: int, seed: int, max_tokens: int) -> Sequence:
    sampling = Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Sequence(token_ids=tokens(length, seed), sampling=sampling)


@pytest.mark.parametrize(
    ("name", "base", "mode"),
    [
        pytest.param(*case, marks=pytest.mark.soak) if case[2] == "exact" and case[:2] in SOAK else case
        for case in CASES
    ],
)
def test_every_way_to_run_rows_equals_transformers(
    name: str,
    base: str,
    mode: str,
    family: Callable[..., tuple[Path, Oracle]],
    open_engine: Callable[..., Engine],
):
    folder, oracle = family(name, base)
    engine = open_engine(folder, mode=mode, max_batch_tokens=120)
    question = tokens(70, 11)
    batches = [
        [Sequence(token_ids=tokens(150, 1), score_from=0)],
        [
            generating(5, 1, 40),
            Sequence(token_ids=tokens(60, 2), score_from=30),
            Sequence(token_ids=tokens(3, 3), score_from=1),
            generating(33, 4, 9),
            generating(21, 5, 20),
            Sequence(token_ids=tokens(170, 6), score_from=2),  # longer than the budget, so in chunks
            generating(150, 7, 12),
            generating(2, 8, 30),
            Sequence(token_ids=tokens(14, 9), score_from=1),
        ],
        [Sequence(token_ids=[*question, *tokens(1 + extra, extra)], score_from=70) for extra in range(3)],
        [generating(40, 12, max_tokens) for max_tokens in (1, 20, 22)],
    ]

    for batch in batches:
        for future in [engine.add([sequence]) for sequence in batch]:
            future.result(60)

    for sequence in [sequence for batch in batches for sequence in batch]:
        assert_agrees(sequence, oracle)
    served = "exact" if mode == "exact" else "default" if name in BATCHED else "one row at a time"
    assert engine.model_info.mode == served


def test_prompts_of_sparse_attention_are_shared(
    family: Callable[..., tuple[Path, Oracle]], open_engine: Callable[..., Engine]
):
    folder, _ = family("deepseek_v32", "base")
    assert open_engine(folder).model_info.self_test == "passed"


@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode"])
def test_padding_has_positions_of_the_table(family: Callable[..., tuple[Path, Oracle]], name: str):
    model, _, _ = load_checked(family(name, "base")[0], "float32")
    table = next(module.wpe for module in model.modules() if "wpe" in module)
    last = table.weight.shape[0] - 1
    looked_up: list[int] = []

    class Table(type(table)):
        def __call__(self, positions: mx.array) -> mx.array:
            looked_up.append(positions.max().item())
            return super().__call__(positions)

    table.__class__ = Table
    cache = kv_cache.new(model)
    model(mx.zeros((1, last - 3), mx.int32), cache)
    model(mx.zeros((1, 10), mx.int32), cache)

    assert looked_up == [last - 4, last]
