"""A sliding window that mlx-lm ignores is applied, limits the context, or refuses the model."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Literal

import pytest

from scorepool.engine import ContextLengthExceeded, Engine, Sampling, Sequence
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_models import CONTEXT_LENGTH, SLIDING_WINDOW, VOCAB_SIZE

LAYER_TYPES = ["full_attention", "sliding_attention"]


def tokens(length: int) -> list[int]:
    draw = Random(length)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


@pytest.mark.parametrize("mode", ["default", "exact"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gemma2", {}),
        ("llama", {"model_type": "mistral"}),
        ("qwen3", {"use_sliding_window": True, "layer_types": LAYER_TYPES}),
        ("starcoder2", {}),
    ],
)
def test_a_window_that_mlx_lm_ignores_is_applied(
    edited: Callable[..., Path],
    open_engine: Callable[..., Engine],
    name: str,
    settings: dict[str, object],
    mode: Literal["default", "exact"],
):
    folder = edited(name, sliding_window=SLIDING_WINDOW, **settings)
    engine, oracle = open_engine(folder, mode=mode, max_batch_tokens=60), Oracle(folder)
    question = tokens(40)
    sequences = [
        Sequence(token_ids=tokens(100), score_from=0),
        Sequence(token_ids=tokens(9), score_from=1),
        Sequence(token_ids=tokens(31), score_from=1),
        *(Sequence(token_ids=tokens(length), sampling=Sampling(max_tokens=30)) for length in (3, 12, 50)),
        *(Sequence(token_ids=[*question, *tokens(length)], score_from=40) for length in (3, 5)),
    ]

    for future in [engine.add([sequence]) for sequence in sequences]:
        future.result(60)

    for sequence in sequences:
        assert_agrees(sequence, oracle)
    assert engine.model_info.context_length == CONTEXT_LENGTH
    assert (engine.model_info.mode, engine.model_info.self_test) == (mode, "passed")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3_moe", {"sliding_window": SLIDING_WINDOW, "use_sliding_window": True}),
        ("llama", {"attention_window_size": SLIDING_WINDOW}),  # PLaMo 2's name
        ("llama", {"sparse_config": {"dense_len": SLIDING_WINDOW + 1}}),  # MiniCPM 4.1's
    ],
)
def test_a_window_that_cannot_be_applied_limits_the_context(
    edited: Callable[..., Path], open_engine: Callable[..., Engine], name: str, settings: dict[str, object]
):
    folder = edited(name, **settings)
    engine, oracle = open_engine(folder), Oracle(folder)
    longest = Sequence(token_ids=tokens(SLIDING_WINDOW), score_from=0)

    engine.add([longest]).result(60)

    assert_agrees(longest, oracle)
    with pytest.raises(ContextLengthExceeded, match=f"context is {SLIDING_WINDOW} tokens"):
        engine.add([Sequence(token_ids=tokens(SLIDING_WINDOW + 1), score_from=0)])


@pytest.mark.parametrize("name", ["mistral", "starcoder2"])
def test_a_switch_that_transformers_does_not_have_leaves_the_window(
    edited: Callable[..., Path], open_engine: Callable[..., Engine], name: str
):
    base = "llama" if name == "mistral" else name
    folder = edited(base, model_type=name, sliding_window=SLIDING_WINDOW, use_sliding_window=False)
    sequence = Sequence(token_ids=tokens(100), score_from=0)

    open_engine(folder).add([sequence]).result(60)

    assert_agrees(sequence, Oracle(folder))


def test_a_disabled_window_does_not_limit_the_context(edited: Callable[..., Path], open_engine: Callable[..., Engine]):
    folder = edited("llama", sliding_window=SLIDING_WINDOW, use_sliding_window=False)

    assert open_engine(folder).model_info.context_length > SLIDING_WINDOW
