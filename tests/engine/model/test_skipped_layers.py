"""A self-test with a few layers of each kind finds what one with all layers finds."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3
from mlx_lm.utils import load_model

from scorepool.engine import Engine, LoadError
from scorepool.engine.model import batch_choice, kv_cache, skipped_layers
from scorepool.engine.model.skipped_layers import skip_equal_layers
from tests.tiny_models import TinyModels


@pytest.fixture
def model(tiny_models: TinyModels) -> Any:
    model, _ = load_model(tiny_models("qwen3_28_layers"))
    return model


@pytest.fixture
def calls(model: Any) -> list[int]:
    """Record the number of each layer whose attention runs."""
    numbers: list[int] = []
    kind = type(model.layers[0].self_attn)

    class Recording(kind):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            numbers.append(next(place for place, layer in enumerate(model.layers) if layer.self_attn is self))
            return kind.__call__(self, *args, **kwargs)

    for layer in model.layers:
        layer.self_attn.__class__ = Recording
    return numbers


def test_the_first_two_and_the_last_of_equal_layers_run(model: Any, calls: list[int]):
    with skip_equal_layers(model) as num_skipped:
        model(mx.array([[1, 2, 3]]))
    assert (num_skipped, calls) == (25, [0, 1, 27])

    model(mx.array([[1, 2, 3]]))
    assert calls[3:] == list(range(28))


def test_every_cache_gets_all_tokens(model: Any):
    cache = kv_cache.new(model)

    with skip_equal_layers(model):
        for length in (5, 1, 3):
            model(mx.ones((1, length), mx.int32), cache=cache)

    assert {layer.offset for layer in cache} == {9}


def test_layers_of_different_settings_are_not_equal(model: Any, calls: list[int]):
    model.layers[7].self_attn.rope.base = 77.0
    model.layers[9].mlp.gate_proj.bias = mx.zeros(model.layers[9].mlp.gate_proj.weight.shape[0])

    with skip_equal_layers(model):
        model(mx.array([[1, 2, 3]]))

    assert calls == [0, 1, 7, 9, 27]


def test_a_model_of_many_layers_is_tested_with_few(
    tiny_models: TinyModels, open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    calls: Counter[int] = Counter()
    call = qwen3.Attention.__call__

    def count(self: Any, *args: Any) -> mx.array:
        calls[id(self)] += 1
        return call(self, *args)

    monkeypatch.setattr(qwen3.Attention, "__call__", count)

    engine = open_engine(tiny_models("qwen3_28_layers"))

    assert engine.model_info.self_test == "passed"
    times = sorted(calls.values())
    assert len(times) == 28
    assert times[-4] < 6 < 20 < times[-3]


@pytest.mark.parametrize("mode", ["default", "exact"])
def test_a_fault_of_every_layer_is_found_with_few(
    tiny_models: TinyModels, open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, mode: str
):
    outcomes: list[object] = []
    choose_with_few_layers = batch_choice._choose_with_few_layers
    call = qwen3.Attention.__call__

    def forgets(self: Any, hidden: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        is_batch = cache is not None and (hidden.shape[0] > 1 if mode == "default" else cache.offset > 0)
        return call(self, hidden, mask, cache) * (0.97 if is_batch else 1)

    def record(*args: Any) -> object:
        outcomes.append(choose_with_few_layers(*args))
        return outcomes[-1]

    monkeypatch.setattr(qwen3.Attention, "__call__", forgets)
    monkeypatch.setattr(batch_choice, "_choose_with_few_layers", record)

    if mode == "default":
        assert open_engine(tiny_models("qwen3_28_layers")).model_info.mode == "one row at a time"
    else:
        with pytest.raises(LoadError, match="self-test"):
            open_engine(tiny_models("qwen3_28_layers"), mode="exact")
    assert outcomes == [None]


@pytest.mark.parametrize("needs", ["raises", "differs"])
def test_an_architecture_that_needs_every_layer_is_tested_whole(
    tiny_models: TinyModels, open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, needs: str
):
    def fail(self: object, hidden: mx.array, *args: object) -> mx.array:
        if needs == "raises":
            raise ValueError("not enough values to unpack")
        return mx.random.normal(hidden.shape)

    monkeypatch.setattr(skipped_layers, "_pass_through", fail)

    assert open_engine(tiny_models("qwen3_28_layers")).model_info.self_test == "passed"
