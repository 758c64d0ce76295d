"""The self-test finds models whose caches or padding are wrong. The tests put the faults into a right model."""

import shutil
import time
from collections.abc import Callable
from math import inf, isfinite
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model
from safetensors.torch import load_file, save_file

from scorepool.engine import Engine, EngineSettings, Sequence
from scorepool.engine.model import kv_rollback, selftest
from scorepool.engine.model.backbone import BackboneTap, FullLogits, split_model
from scorepool.engine.model.batch_invariant import TILE, BatchInvariant
from scorepool.engine.model.config import read_config
from scorepool.engine.model.padded_batch import PaddedBatch
from scorepool.engine.model.selftest import SPECULATION, FailedCheck, SelfTest
from scorepool.engine.model.sequential_batch import SequentialBatch
from tests.tiny_models import CONTEXT_LENGTH, SLIDING_WINDOW, VOCAB_SIZE, TinyModels


@pytest.fixture
def model(tiny_models: TinyModels) -> Any:
    model, _ = load_model(tiny_models("llama"))
    return model


def find_fault(
    model: Any, kind: type[PaddedBatch] | type[SequentialBatch], faulty: Any = None, window: int | None = None
) -> FailedCheck | None:
    right = FullLogits(model) if faulty else split_model(model)
    backbone_and_head = FullLogits(faulty) if faulty else right
    self_test = SelfTest(right, VOCAB_SIZE, CONTEXT_LENGTH, window=window)
    return self_test.find_fault(kind(model, backbone_and_head), backbone_and_head)


@pytest.mark.parametrize("kind", [PaddedBatch, SequentialBatch])
def test_a_right_model_passes_with_and_without_a_tap(model: Any, kind: type[PaddedBatch] | type[SequentialBatch]):
    assert find_fault(model, kind) is None
    assert find_fault(model, kind, lambda token_ids, cache=None: model(token_ids, cache=cache)) is None


def test_attention_to_padding_is_found(model: Any):
    def sees_padding(token_ids: mx.array, cache: Any = None) -> mx.array:
        return model(token_ids, cache=cache) + (token_ids[:, -1:] == 0)[:, :, None] * mx.arange(VOCAB_SIZE)

    assert "padded" in str(find_fault(model, PaddedBatch, sees_padding))
    assert find_fault(model, SequentialBatch, sees_padding) is None


def test_a_cache_that_forgets_is_found(model: Any):
    def forgets(token_ids: mx.array, cache: Any = None) -> mx.array:
        if cache:
            model(token_ids, cache=cache)
        return model(token_ids)

    assert "off by" in str(find_fault(model, PaddedBatch, forgets))
    assert "off by" in str(find_fault(model, SequentialBatch, forgets))


def test_a_wrong_sliding_window_is_found(tiny_models: TinyModels):
    model, _ = load_model(tiny_models("gemma3"), model_config=read_config(tiny_models("gemma3")))

    def slips(token_ids: mx.array, cache: Any = None) -> mx.array:
        """Be wrong once the window is full, and only with a cache."""
        is_full = cache is not None and mx.max(mx.array(cache[0].offset)).item() + token_ids.shape[1] > SLIDING_WINDOW
        return model(token_ids, cache=cache) + is_full * mx.arange(VOCAB_SIZE)

    for kind in (PaddedBatch, SequentialBatch):
        assert find_fault(model, kind, window=SLIDING_WINDOW) is None
        assert find_fault(model, kind, slips, window=SLIDING_WINDOW) is not None


def test_a_cache_that_forgets_the_first_tile_is_found_in_exact_mode(model: Any):
    def forgets(token_ids: mx.array, cache: Any) -> mx.array:
        is_second = cache is not None and cache[0].offset > 0
        return model(token_ids, cache=cache) + is_second * mx.arange(VOCAB_SIZE)

    self_test = SelfTest(FullLogits(model), VOCAB_SIZE, CONTEXT_LENGTH, tile=TILE)

    assert self_test.find_fault(BatchInvariant(model, FullLogits(model))) is None
    fault = self_test.find_fault(BatchInvariant(model, FullLogits(forgets)), FullLogits(forgets))
    assert "longer than a tile" in str(fault)


def test_a_window_that_is_too_slow_to_test_is_named_in_the_outcome(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
):
    assert not selftest.is_quick(4096, seconds=1.0)
    monkeypatch.setattr(selftest, "_MAX_WINDOW_S", 0.0)

    engine = Engine(EngineSettings(model=str(tiny_models("gemma3"))))
    engine.close()

    assert engine.model_info.self_test == f"passed; too slow to test beyond its window of {SLIDING_WINDOW} tokens"


@pytest.mark.parametrize("context_length", [SLIDING_WINDOW, SLIDING_WINDOW + 1])
def test_no_window_is_tested_beyond_the_context(
    edited: Callable[..., Path], open_engine: Callable[..., Engine], context_length: int
):
    engine = open_engine(edited("gemma3", max_position_embeddings=context_length), mode="exact")

    assert (engine.model_info.context_length, engine.model_info.self_test) == (context_length, "passed")


def test_one_pause_of_the_machine_does_not_skip_the_window_test(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
):
    right, pauses_s = time.perf_counter, iter([0.0, 60.0])
    monkeypatch.setattr(time, "perf_counter", lambda: right() + next(pauses_s, 60.0))

    engine = Engine(EngineSettings(model=str(tiny_models("gemma3"))))
    engine.close()

    assert engine.model_info.self_test == "passed"


def test_a_model_that_raises_in_a_batch_is_found(model: Any):
    def raises(token_ids: mx.array, cache: Any = None) -> mx.array:
        if token_ids.shape[0] > 1:
            raise ValueError("no batches")
        return model(token_ids, cache=cache)

    assert "no batches" in str(find_fault(model, PaddedBatch, raises))
    assert find_fault(model, SequentialBatch, raises) is None


def test_a_model_without_a_known_backbone_is_served_by_its_logits(model: Any):
    class Strange:
        def __call__(self, token_ids: mx.array, cache: Any = None) -> mx.array:
            return model(token_ids, cache=cache)

    assert isinstance(split_model(model), BackboneTap)
    assert isinstance(split_model(Strange()), FullLogits)


def test_a_model_that_excludes_tokens_passes_and_says_minus_infinity(tiny_models: TinyModels, tmp_path: Path):
    folder = shutil.copytree(tiny_models("phi"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.bias"][100:300] = -inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = Engine(EngineSettings(model=str(folder)))
    sequence = Sequence(token_ids=[0, 5, 150, 7], score_from=1, top_logprobs=320, rank=True, entropy=True)

    engine.add([sequence]).result(60)
    engine.close()

    assert (engine.model_info.mode, engine.model_info.self_test) == ("default", "passed")
    assert sequence.columns.logprobs[1] == -inf
    assert sequence.columns.top_logprobs[0].count(-inf) == 320 - (VOCAB_SIZE - 200)
    assert isfinite(sequence.columns.logprobs[0])
    assert all(map(isfinite, sequence.columns.entropies))


@pytest.mark.parametrize("fault", ["keeps rejected tokens", "keeps the padding of rows that propose fewer"])
def test_a_batch_that_keeps_rejected_tokens_is_found_and_proposes_none(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, fault: str
):
    def drop_rejected(batch: PaddedBatch, num_rejected: dict[Sequence, int]) -> None:
        if fault.endswith("fewer"):
            kv_rollback.drop_last(batch._cache, list(num_rejected.values()))

    settings = EngineSettings(model=str(tiny_models("llama")), speculation="ngram")
    right = Engine(settings)
    monkeypatch.setattr(PaddedBatch, "drop_rejected", drop_rejected)
    wrong = Engine(settings)
    right.close()
    wrong.close()

    assert (right.model_info.speculation, right.model_info.self_test) == ("ngram", "passed")
    assert (wrong.model_info.speculation, wrong.model_info.mode) == ("unsupported", "default")
    assert wrong.model_info.self_test.startswith(f"passed; no tokens are proposed: {SPECULATION} is off by ")


def test_a_window_is_not_tested_if_it_takes_another_rank_too_long(model: Any):
    answers: list[bool] = []

    def all_agree(answer: bool) -> bool:
        answers.append(answer)
        return False

    self_test = SelfTest(FullLogits(model), VOCAB_SIZE, CONTEXT_LENGTH, window=8, all_agree=all_agree)

    assert answers == [True, True]
    assert self_test.outcome == "passed; too slow to test beyond its window of 8 tokens"
