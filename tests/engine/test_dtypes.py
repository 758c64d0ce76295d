"""16-bit and quantised models: logprobs are normalised in float32, whatever the model computes in."""

from collections.abc import Callable
from math import exp
from pathlib import Path

import pytest
from mlx_lm.convert import convert

from engine import Engine, EngineSettings, Sequence
from tests.engine.oracle import Oracle
from tests.tiny_models import VOCAB_SIZE, TinyModels

TOKENS = [0, 44, 55, 66, 77, 88]


def scored(engine: Engine) -> Sequence:
    row = Sequence(token_ids=list(TOKENS), score_from=1, top_logprobs=VOCAB_SIZE, rank=True)
    engine.add([row]).result(60)
    return row


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 0.05), ("bfloat16", 0.3)])
def test_probabilities_add_up_to_one_in_every_dtype(
    engine_of: Callable[..., Engine], oracle: Oracle, dtype: str, tolerance: float
):
    engine = engine_of("llama", dtype=dtype)

    row = scored(engine)

    assert engine.facts.dtype == dtype
    for values in row.top_values:
        assert sum(map(exp, values)) == pytest.approx(1, abs=1e-5)
    expected = oracle.logprobs(TOKENS)
    assert row.logprobs == pytest.approx([expected[t, TOKENS[t + 1]] for t in range(5)], abs=tolerance)


def test_equal_logits_are_ordered_by_token_id(engine_of: Callable[..., Engine]):
    row = scored(engine_of("llama", dtype="bfloat16"))

    ties = 0
    for ids, values in zip(row.top_ids, row.top_values, strict=True):
        assert list(zip(ids, values, strict=True)) == sorted(
            zip(ids, values, strict=True), key=lambda top: (-top[1], top[0])
        )
        ties += len(values) - len(set(values))
    assert ties  # the case is there: bf16 has few values
    assert [ids[rank - 1] for ids, rank in zip(row.top_ids, row.ranks, strict=True)] == TOKENS[1:]


def test_a_quantised_model_keeps_its_packed_weights(tiny_models: TinyModels, tmp_path: Path):
    folder = tmp_path / "quantised"
    convert(str(tiny_models("llama")), str(folder), quantize=True, q_bits=8, q_group_size=64)

    engine = Engine(EngineSettings(model=str(folder)))
    row = scored(engine)
    engine.close()

    assert engine.facts.quantization == "8-bit affine, groups of 64"
    assert engine.facts.dtype == "float32"
    assert all(value <= 0 for value in row.logprobs)
