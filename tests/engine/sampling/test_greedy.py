"""Greedy generation is that of the two libraries which know the model: transformers and mlx-lm, one row at a time."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from scorepool.engine import Engine, Sampling, Sequence
from scorepool.engine.model import rope as positions
from scorepool.engine.model.config import read_config
from tests.engine.oracle import Oracle
from tests.engine.test_against_transformers import tokens
from tests.tiny_models import SLIDING_WINDOW

MODELS = [
    "demo",
    "llama",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "granitehybrid",
    "lfm2",
    "mamba",
    "mamba2",
]
NUM_TOKENS = 2 * SLIDING_WINDOW


def by_mlx_lm(folder: Path, prompt: list[int], eos_ids: frozenset[int]) -> list[int]:
    """With the rotary periods that gpt-oss asks for: mlx-lm's own generate other tokens."""
    model, config = load_model(folder, model_config=read_config(folder))
    model.set_dtype(mx.float32)
    positions.settle(model, config)
    found: list[int] = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=NUM_TOKENS):
        found.append(int(token))
        if token in eos_ids:
            break
    return found


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers_and_of_mlx_lm(
    name: str,
    engine_of: Callable[..., Engine],
    oracle_of: Callable[[str], Oracle],
    folder_of: Callable[[str], Path],
):
    prompts = [tokens(length, seed=length) for length in (3, SLIDING_WINDOW + 5, 40)]
    rows = [
        Sequence(token_ids=list(prompt), sampling=Sampling(max_tokens=NUM_TOKENS, temperature=0)) for prompt in prompts
    ]

    engine = engine_of(name)
    engine.add(rows).result(60)

    for row, prompt in zip(rows, prompts, strict=True):
        generated = row.token_ids[len(prompt) :]
        assert generated == oracle_of(name).continued(prompt, NUM_TOKENS)
        assert generated == by_mlx_lm(folder_of(name), prompt, engine.tokenizer.eos_ids)
