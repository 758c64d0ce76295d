"""KV caches get the memory that weights and prefix cache leave, and a model that leaves none is refused."""

from pathlib import Path

import pytest

from scorepool.engine import Engine, EngineSettings, LoadError, Sequence
from scorepool.engine.model import memory_budget
from tests.tiny_models import TinyModels

BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4  # of the tiny llama: layers, keys and values, heads, head_dim, float32


@pytest.fixture
def llama(tiny_models: TinyModels) -> Path:
    return tiny_models("llama")


def max_cached_tokens(folder: Path, **settings: int) -> int:
    engine = Engine(EngineSettings(model=str(folder), **settings))
    engine.close()
    return engine.model_info.max_cached_tokens


def test_more_memory_holds_more_tokens_and_a_larger_prefix_cache_leaves_fewer(llama: Path):
    memory_bytes, prefix_cache_bytes = 2**24, 2**20

    tokens = max_cached_tokens(llama, memory_bytes=memory_bytes, prefix_cache_bytes=prefix_cache_bytes)

    memory_bytes += 1000 * BYTES_PER_TOKEN
    assert max_cached_tokens(llama, memory_bytes=memory_bytes, prefix_cache_bytes=prefix_cache_bytes) == tokens + 1000
    prefix_cache_bytes += 1500 * BYTES_PER_TOKEN
    assert max_cached_tokens(llama, memory_bytes=memory_bytes, prefix_cache_bytes=prefix_cache_bytes) == tokens - 500


def test_a_model_that_leaves_no_memory_is_refused_with_the_numbers(llama: Path):
    settings = EngineSettings(model=str(llama), memory_bytes=2**20, prefix_cache_bytes=2**20)

    with pytest.raises(LoadError, match=rf"no memory is left .* of {2**20} bytes .* the prefix cache {2**20}"):
        Engine(settings)


def test_other_weights_for_which_there_is_no_memory_are_refused_and_those_before_serve_on(
    llama: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = Engine(EngineSettings(model=str(llama)))
    try:
        before = engine.model_info
        with monkeypatch.context() as patch:
            patch.setattr(memory_budget, "_available_bytes", lambda: 2**20)
            with pytest.raises(
                LoadError, match=rf"no memory for a second copy of the weights: of {2**20 * 4 // 5} bytes"
            ):
                engine.stage_weights(str(llama), 1).result(60)
        assert engine.add([Sequence(token_ids=[5, 6, 7], score_from=1)]).result(60)[0].model_info == before
        assert engine.stage_weights(str(llama), 1).result(60).weights_version == 1
    finally:
        engine.close()
