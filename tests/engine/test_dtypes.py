"""float32, bfloat16, float16 and 4-bit: logprobs are normalised in float32, whatever dtype the model computes in.

The errors in 16 bits are compared with those of transformers in the same dtype over the same 396 tokens: their root
mean square may be at most 1.5 times as large. The largest of 396 errors is random (two correct implementations differed
by 1.7 times), so it may be twice as large.
"""

import json
import shutil
from collections.abc import Callable
from math import exp
from pathlib import Path
from random import Random

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.convert import convert
from mlx_lm.utils import load_model
from safetensors.torch import load_file, save_file

from scorepool.engine import Engine, EngineSettings, LoadError, Sampling, Sequence
from scorepool.engine.model.config import read_config
from tests.engine.oracle import Oracle
from tests.tiny_models import VOCAB_SIZE

TOKENS = [0, 44, 55, 66, 77, 88]
_draw = Random(0)
ROWS = [[0] + [_draw.randrange(3, VOCAB_SIZE) for _ in range(99)] for _ in range(4)]
DENSE = ["llama", "qwen3", "gemma2", "gemma3", "gpt_bigcode", "granitehybrid", "lfm2", "mamba", "mamba2", "nemotron_h"]


def score(engine: Engine, token_ids: list[int] = TOKENS) -> Sequence:
    sequence = Sequence(token_ids=list(token_ids), score_from=1, top_logprobs=VOCAB_SIZE, rank=True)
    engine.add([sequence]).result(60)
    return sequence


def expected_logprobs(logprobs: Callable[[list[int]], np.ndarray]) -> np.ndarray:
    """Return the logprobs of every token of ROWS but the first ones."""
    return np.concatenate([logprobs(row)[np.arange(99), row[1:]] for row in ROWS])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", DENSE)
def test_errors_in_16_bits_are_at_most_1_5_times_those_of_transformers(
    folder_of: Callable[[str], Path],
    engine_of: Callable[..., Engine],
    oracle_of: Callable[[str], Oracle],
    name: str,
    dtype: str,
):
    expected = expected_logprobs(oracle_of(name).logprobs)
    peer_errors = np.abs(expected_logprobs(Oracle(folder_of(name), getattr(torch, dtype)).logprobs) - expected)
    sequences = [Sequence(token_ids=list(row), score_from=1, top_logprobs=1) for row in ROWS]
    engine = engine_of(name, dtype=dtype)
    engine.add(sequences).result(100)

    errors = np.abs(np.concatenate([sequence.columns.logprobs for sequence in sequences]) - expected)

    assert engine.model_info.dtype == dtype
    assert np.sqrt((errors**2).mean()) <= 1.5 * np.sqrt((peer_errors**2).mean())
    assert errors.max() <= 2 * peer_errors.max()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_logprobs_and_top_logprobs_agree_in_every_dtype(engine_of: Callable[..., Engine], dtype: str):
    sequence = score(engine_of("llama", dtype=dtype))

    assert_is_one_distribution(sequence)


def assert_is_one_distribution(sequence: Sequence) -> None:
    """Check that probabilities add up to 1 and that a token has exactly the same value in both columns."""
    for ids, values, rank, logprob, token in zip(
        sequence.columns.top_ids,
        sequence.columns.top_logprobs,
        sequence.columns.ranks,
        sequence.columns.logprobs,
        TOKENS[1:],
        strict=True,
    ):
        assert sum(map(exp, values)) == pytest.approx(1, abs=1e-5)
        assert (ids[rank - 1], values[rank - 1]) == (token, logprob)
        assert list(zip(values, ids, strict=True)) == sorted(
            zip(values, ids, strict=True), key=lambda top: (-top[0], top[1])
        )


def test_equal_logits_are_ordered_by_token_id(engine_of: Callable[..., Engine]):
    sequence = score(engine_of("llama", dtype="bfloat16"))

    assert_is_one_distribution(sequence)
    assert any(
        len(values) > len(set(values)) for values in sequence.columns.top_logprobs
    )  # equal values occur, because bf16 has few


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_in_16_bits_are_refused_on_a_cpu(folder_of: Callable[[str], Path], name: str):
    if mx.default_device() == mx.gpu:
        pytest.skip("only the CPU's gathered matrix product requires float32")
    with pytest.raises(LoadError, match="float32"):
        Engine(EngineSettings(model=str(folder_of(name)), dtype="bfloat16"))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_4_bit_model_scores_like_mlx(folder_of: Callable[[str], Path], tmp_path: Path, name: str):
    folder = tmp_path / "quantised"
    source = shutil.copytree(folder_of(name), tmp_path / "source")
    (source / "config.json").write_text(json.dumps(read_config(source)))  # with the names that mlx-lm's converter reads
    convert(str(source), str(folder), quantize=True, q_bits=4, q_group_size=32)
    model, _ = load_model(folder)
    engine = Engine(EngineSettings(model=str(folder)))
    sequences = [Sequence(token_ids=list(row), score_from=1, top_logprobs=5) for row in ROWS]
    greedy = Sequence(token_ids=list(TOKENS), sampling=Sampling(max_tokens=8, temperature=0))
    engine.add([*sequences, greedy]).result(60)
    short = score(engine)
    engine.close()

    assert engine.model_info.quantization == "4-bit affine, groups of 32"
    assert engine.model_info.dtype == "float32"
    assert_is_one_distribution(short)
    for sequence in sequences:
        expected = mlx_logprobs(model, sequence.token_ids)
        assert sequence.columns.logprobs == pytest.approx(
            expected[np.arange(99), sequence.token_ids[1:]].tolist(), abs=TOLERANCE_4_BIT
        )
    expected = mlx_logprobs(model, greedy.token_ids)[5:-1]
    assert greedy.token_ids[6:] == expected.argmax(axis=-1).tolist()
    assert greedy.columns.logprobs == pytest.approx(expected.max(axis=-1).tolist(), abs=TOLERANCE_4_BIT)


TOLERANCE_4_BIT = 1e-5  # float32 activations: rounding of the fast BLAS depends on the shape


def mlx_logprobs(model: object, token_ids: list[int]) -> np.ndarray:
    """Run mlx-lm's model on one row, with float32 weights or scales and a float64 softmax."""
    logits = np.array(model(mx.array([token_ids]))[0].astype(mx.float32)).astype(np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


@pytest.fixture(scope="module")
def peaked(folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a llama with a head so large that the most likely token is nearly certain."""
    folder = tmp_path_factory.mktemp("peaked")
    for file in folder_of("llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_nearly_certain_token_has_a_logprob_below_zero(peaked: Path, dtype: str):
    """A logprob is 0.0 only if the float64 softmax is below float32's resolution of the logits."""
    oracle = Oracle(peaked)
    engine = Engine(EngineSettings(model=str(peaked), dtype=dtype))
    sequences = [Sequence(token_ids=list(row), sampling=Sampling(max_tokens=16, temperature=0)) for row in ROWS]
    engine.add(sequences).result(60)
    engine.close()
    logprobs = np.concatenate([sequence.columns.logprobs for sequence in sequences])

    expected = np.concatenate([oracle.logprobs(sequence.token_ids)[99:-1].max(axis=-1) for sequence in sequences])
    resolution = 16 * np.finfo(np.float32).eps * 60  # logits of about 60
    certain = logprobs == 0
    assert (logprobs <= 0).all()
    assert (expected > -0.01).sum() >= 5  # nearly certain tokens occur
    if dtype == "float32":
        assert np.abs(logprobs - expected).max() <= 1e-3
        assert (expected[certain] > -resolution).all()
    else:  # the model rounds, the normalisation does not; normalised in bf16, 159 of 256 such tokens were 0.0
        assert certain.mean() <= max((expected > -resolution).mean(), 0.1)
