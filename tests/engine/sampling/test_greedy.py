"""Greedy generation gives the tokens of transformers and of mlx-lm, each run one row at a time."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from scorepool.engine import Engine, Sampling, Sequence
from scorepool.engine.model import rope
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


def generate_with_mlx_lm(folder: Path, prompt: list[int], eos_ids: frozenset[int]) -> list[int]:
    """Generate with mlx-lm, patched to gpt-oss's configured rotary periods; its own periods give other tokens."""
    model, config = load_model(folder, model_config=read_config(folder))
    model.set_dtype(mx.float32)
    rope.check_or_patch(model, config)
    generated: list[int] = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=NUM_TOKENS):
        generated.append(int(token))
        if token in eos_ids:
            break
    return generated


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_those_of_transformers_and_mlx_lm(
    name: str,
    engine_of: Callable[..., Engine],
    oracle_of: Callable[[str], Oracle],
    folder_of: Callable[[str], Path],
):
    prompts = [tokens(length, seed=length) for length in (3, SLIDING_WINDOW + 5, 40)]
    sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0)
    sequences = [Sequence(token_ids=list(prompt), sampling=sampling) for prompt in prompts]

    engine = engine_of(name)
    engine.add(sequences).result(60)

    for sequence, prompt in zip(sequences, prompts, strict=True):
        generated = sequence.token_ids[len(prompt) :]
        assert generated == oracle_of(name).generate(prompt, NUM_TOKENS)
        assert generated == generate_with_mlx_lm(folder_of(name), prompt, engine.tokenizer.eos_ids)
