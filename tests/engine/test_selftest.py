"""The self-test finds models whose caches or padding are wrong. The faults are put into a right model."""

import shutil
from math import inf, isfinite
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model
from safetensors.torch import load_file, save_file

from engine import Engine, EngineSettings, Sequence, selftest
from engine.batch import Batch, Merged, Single
from engine.tap import FullLogits, Tap, split_model
from tests.tiny_models import VOCAB_SIZE, TinyModels


@pytest.fixture
def model(tiny_models: TinyModels) -> Any:
    model, _ = load_model(tiny_models("llama"))
    return model


def find_fault(model: Any, kind: type[Merged] | type[Single], faulty: Any = None) -> str | None:
    rows = selftest.trial_rows(VOCAB_SIZE)
    reference = selftest.reference_logprobs(model, rows)
    halves = FullLogits(faulty) if faulty else split_model(model)
    batch: Batch = kind(model, halves)
    return selftest.find_fault(batch, halves, reference, rows)


@pytest.mark.parametrize("kind", [Merged, Single])
def test_a_right_model_passes_with_and_without_a_tap(model: Any, kind: type[Merged] | type[Single]):
    assert find_fault(model, kind) is None
    assert find_fault(model, kind, lambda token_ids, cache=None: model(token_ids, cache=cache)) is None


def test_padding_that_is_seen_is_found(model: Any):
    def sees_padding(token_ids: mx.array, cache: Any = None) -> mx.array:
        return model(token_ids, cache=cache) + (token_ids[:, -1:] == 0)[:, :, None] * mx.arange(VOCAB_SIZE)

    assert "padded" in (find_fault(model, Merged, sees_padding) or "")
    assert find_fault(model, Single, sees_padding) is None


def test_a_cache_that_forgets_is_found(model: Any):
    def forgets(token_ids: mx.array, cache: Any = None) -> mx.array:
        if cache:
            model(token_ids, cache=cache)
        return model(token_ids)

    assert "off by" in (find_fault(model, Merged, forgets) or "")
    assert "off by" in (find_fault(model, Single, forgets) or "")


def test_a_model_that_raises_in_a_batch_is_found(model: Any):
    def raises(token_ids: mx.array, cache: Any = None) -> mx.array:
        if token_ids.shape[0] > 1:
            raise ValueError("no batches")
        return model(token_ids, cache=cache)

    assert "no batches" in (find_fault(model, Merged, raises) or "")
    assert find_fault(model, Single, raises) is None


def test_a_model_without_a_known_backbone_is_served_by_its_logits(model: Any):
    class Strange:
        def __call__(self, token_ids: mx.array, cache: Any = None) -> mx.array:
            return model(token_ids, cache=cache)

    assert isinstance(split_model(model), Tap)
    assert isinstance(split_model(Strange()), FullLogits)


def test_a_model_that_excludes_tokens_passes_and_says_minus_infinity(tiny_models: TinyModels, tmp_path: Path):
    folder = shutil.copytree(tiny_models("phi"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.bias"][100:300] = -inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = Engine(EngineSettings(model=str(folder)))
    row = Sequence(token_ids=[0, 5, 150, 7], score_from=1, top_logprobs=320, rank=True, entropy=True)

    engine.add([row]).result(60)
    engine.close()

    assert (engine.facts.mode, engine.facts.self_test) == ("default", "passed")
    assert row.logprobs[1] == -inf
    assert row.top_values[0].count(-inf) == 320 - (VOCAB_SIZE - 200)
    assert isfinite(row.logprobs[0])
    assert all(map(isfinite, row.entropies))
