"""Embeddings equal the pooled last hidden states of transformers with the same weights, in whatever batch they run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
import torch
from transformers import AutoModel

from scorepool.engine import Engine, InvalidRequest, LoadError, NonFiniteLogits, Pooling, Sampling, Sequence
from scorepool.engine.model import pooling
from scorepool.engine.scheduling.slice import Slice
from tests.engine.test_classifiers import tokens
from tests.tiny_models import TinyModels

Open = Callable[..., Engine]
FAMILIES = ("llama", "qwen3", "gemma", "gemma2", "gpt2", "phi", "starcoder2", "qwen3_moe", "qwen3_next", "deepseek_v2")
TEXTS = [
    *(tokens(length, length) for length in (1, 5, 17)),
    tokens(90, 90),  # longer than a step, so in chunks
    *(tokens(40, 1) + ending for ending in ([], [7, 8], [9], [7, 8, 5, 6])),  # on a shared prefix
    tokens(40, 1),
]


def expected(folder: Path, text: list[int], how: Pooling) -> torch.Tensor:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        hidden = model(torch.tensor([text]), use_cache=False).last_hidden_state[0].double()
    return hidden[-1] if how == "last" else hidden.mean(dim=0)


def cosine_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference of two vectors that are divided by their lengths."""
    return float((found / found.norm() - wanted / wanted.norm()).abs().max())


def embed(engine: Engine, how: Pooling, *texts: list[int]) -> list[list[float]]:
    sequences = [Sequence(token_ids=list(text), pooling=how) for text in texts]
    engine.add(sequences).result(60)
    return [sequence.embedding for sequence in sequences]


@pytest.mark.parametrize("how", ["last", "mean"])
@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_equal_transformers_alone_and_in_a_mixed_batch(
    name: str, how: Pooling, tiny_models: TinyModels, open_engine: Open
):
    folder = tiny_models(name)
    engine = open_engine(folder, max_batch_tokens=64)
    others = [
        engine.add([Sequence(token_ids=tokens(30, 7), score_from=1)]),
        engine.add([Sequence(token_ids=tokens(8, 8), sampling=Sampling(max_tokens=20, temperature=0.0))]),
    ]
    together = embed(engine, how, *TEXTS)
    for other in others:
        other.result(60)
    for text, found in zip(TEXTS, together, strict=True):
        wanted = expected(folder, text, how)
        assert cosine_error(torch.tensor(found), wanted) < 1e-5, len(text)
        assert torch.tensor(found).double().sub(wanted).abs().max() < 1e-4 * wanted.abs().max()
    for text in TEXTS[:4]:
        [alone] = embed(engine, how, text)
        assert cosine_error(torch.tensor(alone), expected(folder, text, how)) < 1e-5


def test_rows_beside_embeddings_keep_their_numbers(tiny_models: TinyModels, open_engine: Open):
    engine = open_engine(tiny_models("llama"), max_batch_tokens=64)

    def scored() -> list[float | None]:
        sequence = Sequence(token_ids=tokens(50, 3), score_from=1)
        waiting = engine.add([sequence])
        embed(engine, "mean", *TEXTS)
        waiting.result(60)
        return sequence.columns.logprobs

    alone = Sequence(token_ids=tokens(50, 3), score_from=1)
    engine.add([alone]).result(60)
    assert scored() == pytest.approx(alone.columns.logprobs, abs=1e-5)


def test_exact_mode_gives_the_same_bits_in_any_batch(tiny_models: TinyModels, open_engine: Open):
    engine = open_engine(tiny_models("llama"), mode="exact", max_batch_tokens=64)
    together = embed(engine, "last", *TEXTS)
    assert together == [embed(engine, "last", text)[0] for text in TEXTS]


def test_exact_mode_gives_the_same_mean_however_a_text_is_cut_into_chunks(tiny_models: TinyModels, open_engine: Open):
    whole, *cut = (open_engine(tiny_models("llama"), mode="exact", max_batch_tokens=size) for size in (2048, 64, 23))
    text = tokens(200, 9)
    [expected_mean] = embed(whole, "mean", text)
    for engine in cut:
        assert embed(engine, "mean", text) == [expected_mean]


def pooled_model(tiny_models: TinyModels, folder: Path, settings: object) -> Path:
    copy = Path(shutil.copytree(tiny_models("llama"), folder / "model"))
    (copy / "1_Pooling").mkdir()
    (copy / "1_Pooling" / "config.json").write_text(settings if isinstance(settings, str) else json.dumps(settings))
    return copy


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_max_tokens": True}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, None),
        ({}, None),
    ],
)
def test_a_model_says_how_it_pools(
    settings: object, pooling: str | None, tiny_models: TinyModels, tmp_path: Path, open_engine: Open
):
    engine = open_engine(pooled_model(tiny_models, tmp_path, settings))
    assert engine.model_info.pooling == pooling
    if pooling is None:
        with pytest.raises(InvalidRequest, match="this model makes no embeddings"):
            engine.add([Sequence(token_ids=[1, 2], pooling="last")])


def test_a_model_pools_as_before_after_a_push_of_weights(tiny_models: TinyModels, tmp_path: Path, open_engine: Open):
    folder = pooled_model(tiny_models, tmp_path, {"pooling_mode_mean_tokens": True})
    engine = open_engine(folder)
    engine.stage_weights(str(tiny_models("llama")), 1).result(60)
    engine.switch_weights().result(60).result(60)
    assert (engine.model_info.weights_version, engine.model_info.pooling) == (1, "mean")


@pytest.mark.parametrize("settings", ["{", "[1]"])
def test_settings_that_cannot_be_read_refuse_the_load(
    settings: str, tiny_models: TinyModels, tmp_path: Path, open_engine: Open
):
    with pytest.raises(LoadError, match=r"1_Pooling/config\.json cannot be read"):
        open_engine(pooled_model(tiny_models, tmp_path, settings))


def test_a_model_whose_hidden_states_were_not_compared_makes_no_embeddings(tiny_models: TinyModels, open_engine: Open):
    assert open_engine(tiny_models("mamba")).model_info.pooling is None


def test_nothing_else_is_asked_of_an_embedded_sequence(tiny_models: TinyModels, open_engine: Open):
    engine = open_engine(tiny_models("llama"))
    with pytest.raises(InvalidRequest, match="expected no score_from, no sampling"):
        engine.add([Sequence(token_ids=[1, 2], pooling="last", score_from=1)])


def test_hidden_states_that_are_not_finite_fail_the_sequence():
    sequences = [Sequence(token_ids=[1, 2], pooling="mean") for _ in range(2)]
    slices = [Slice.prefill(sequence) for sequence in sequences]
    rows = mx.array([[1.0, 2.0], [3.0, 4.0], [1.0, float("nan")], [3.0, 4.0], [9.0, 9.0]])

    step, others = pooling.pool(list(zip(slices, (0, 2), strict=True)), rows)
    good, bad = pooling.read(step)

    assert others.tolist() == [[9.0, 9.0]]
    assert (good.error, sequences[0].embedding) == (None, [2.0, 3.0])
    assert isinstance(bad.error, NonFiniteLogits)
    assert sequences[1].embedding is None
