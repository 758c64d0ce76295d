"""What the engine computes in the place of MLX on CPUs without its SIMD is within 1e-6 of what MLX computes."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models import activations, base, qwen3
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.rope_utils import Llama3RoPE

from scorepool.engine.model import cpu_kernels, kv_cache
from scorepool.engine.model.rope import ConfiguredRoPE
from scorepool.engine.model.rope_frequencies import RopeFrequencies

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="only the CPU's layers are replaced")

TOLERANCE = 1e-6
LEFT_PADDING = mx.array([0, 3, 40])
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def difference(one: mx.array, other: mx.array) -> float:
    return float(mx.abs(one - other).max().item())


@pytest.mark.parametrize("length", [2, 64, 100, 150, 290])
@pytest.mark.parametrize("num_before", [0, 37])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "padded", "added", "per_head", "keys"])
def test_attention_is_that_of_mlx(length: int, num_before: int, mask: str):
    mx.random.seed(0)
    num_keys = num_before + length
    queries = mx.random.normal((3, 4, length, 48))
    keys, values = mx.random.normal((3, 2, num_keys, 48)), mx.random.normal((3, 2, num_keys, 48))
    causal = create_causal_mask(length, num_before)
    masks: dict[str, Any] = {
        "none": None,
        "causal": "causal",
        "bool": create_causal_mask(length, num_before, window_size=20),
        "padded": create_causal_mask(length, num_before, left_padding=LEFT_PADDING),
        "added": mx.where(causal, mx.random.normal(causal.shape), -mx.inf),
        "per_head": mx.random.normal((1, 4, length, num_keys)),
        "keys": mx.arange(num_keys) >= LEFT_PADDING[:, None, None, None] // 40,  # the same for all queries
    }

    found = cpu_kernels.attention(queries, keys, values, None, 0.2, masks[mask])
    expected = base.scaled_dot_product_attention(queries, keys, values, None, 0.2, masks[mask])

    assert found.shape == expected.shape
    if mask == "padded":  # queries that see no key are padding
        sees_some = masks[mask].any(axis=-1)[..., None]
        found, expected = mx.where(sees_some, found, 0), mx.where(sees_some, expected, 0)
    assert difference(found, expected) < TOLERANCE * float(mx.abs(values).max().item())


def test_attention_leaves_its_inputs_alone():
    queries = keys = values = mx.random.normal((1, 4, 128, 32))
    mask = create_causal_mask(128, left_padding=mx.array([5]))
    before = np.array(queries), np.array(mask)
    mx.eval(cpu_kernels.attention(queries, keys, values, None, 1.0, mask))
    assert np.array_equal(before[0], np.array(queries))
    assert np.array_equal(before[1], np.array(mask))


def test_swiglu_is_that_of_mlx():
    values = mx.concatenate([mx.linspace(-120, 120, 40_000), mx.random.normal((25_536,))])
    gate = values.reshape(1, 64, -1)
    x = mx.random.normal(gate.shape)
    before = np.array(gate), np.array(x)

    found, expected = cpu_kernels.swiglu(gate, x), activations.swiglu(gate, x)

    exact = before[0].astype(np.float64) / (1 + np.exp(-before[0].astype(np.float64))) * before[1]
    assert (np.abs(np.array(found) - exact) <= TOLERANCE * np.abs(exact) + 1e-30).all()
    assert difference(found, expected) < TOLERANCE * float(mx.abs(expected).max().item())
    assert np.array_equal(before[0], np.array(gate))
    assert np.array_equal(before[1], np.array(x))


def test_swiglu_takes_gates_that_do_not_lie_in_order():
    gate, x = mx.random.normal((600, 1, 64)).T, mx.random.normal((64, 1, 600)).reshape(64, 1, 600)
    gate, x = gate.swapaxes(0, 1), x.swapaxes(0, 1)
    assert not np.array(gate, copy=False).flags.c_contiguous

    found, expected = cpu_kernels.swiglu(gate, x), activations.swiglu(gate, x)

    assert difference(found, expected) < TOLERANCE * float(mx.abs(expected).max().item())


def rotary_model(module: Module) -> Any:
    model: Any = Module()  # type: ignore[no-untyped-call]
    model.rope = module
    return model


def rotary_modules() -> dict[str, Module]:
    frequencies = RopeFrequencies([1.0, 3.5, 20.0, 900.0], 1.25)
    return {
        "default": RoPE(8, base=5000.0),  # type: ignore[no-untyped-call]
        "scaled": RoPE(8, scale=0.25),  # type: ignore[no-untyped-call]
        "llama3": Llama3RoPE(8, 128, scaling_config=LLAMA3),  # type: ignore[no-untyped-call]
        "configured": ConfiguredRoPE(frequencies, traditional=False),
    }


def test_nothing_is_read_beyond_a_rotary_table(monkeypatch: pytest.MonkeyPatch):
    """Padding may stand at any position: a row of three tokens at the end of a context, beside one of a thousand."""
    monkeypatch.setattr(cpu_kernels, "_HAS_SIMD", False)
    model = rotary_model(rotary_modules()["default"])
    cpu_kernels.install(model, 2048)
    x = mx.random.normal((2, 2, 1, 8))

    found = model.rope(x, offset=mx.array([3, 10**9]))

    assert difference(found, model.rope(x, offset=mx.array([3, 2047]))) == 0


@pytest.mark.parametrize("name", rotary_modules())
@pytest.mark.parametrize("offset", [0, 7, 1000, mx.array([0, 900, 3])])
@pytest.mark.parametrize("length", [1, 5])
def test_rotary_tables_hold_what_the_module_computes(
    name: str, offset: int | mx.array, length: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cpu_kernels, "_HAS_SIMD", False)
    model = rotary_model(rotary_modules()[name])
    cpu_kernels.install(model, 2048)
    x = mx.random.normal((3, 2, length, 8))

    found, expected = model.rope(x, offset=offset), rotary_modules()[name](x, offset=offset)

    assert type(model.rope).__name__ == "TabledRotary"
    assert difference(found, expected) < TOLERANCE


def test_layers_of_one_decode_step_look_positions_up_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_kernels, "_HAS_SIMD", False)
    model: Any = Module()  # type: ignore[no-untyped-call]
    model.ropes = [RoPE(8), RoPE(8), RoPE(8, base=3.0)]  # type: ignore[no-untyped-call]
    cpu_kernels.install(model, 64)
    layers = [kv_cache.UnpaddedBatchKVCache([0, 0]) for _ in model.ropes]
    x = mx.random.normal((2, 1, 1, 8))
    for position in range(3):
        kv_cache.set_padding(layers, {position})
        offsets = [layer.offset for layer in layers]
        for rope, layer in zip(model.ropes, layers, strict=True):
            expected = RoPE(8, base=rope.base)(x, offset=position)  # type: ignore[no-untyped-call]
            assert difference(rope(x, offset=layer.offset), expected) < TOLERANCE
            layer.update_and_fetch(x, x)
        assert offsets[0] is offsets[1] is offsets[2]
        assert len(offsets[0].derived) == 2


def test_rotary_tables_leave_what_they_do_not_hold_to_the_module(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_kernels, "_HAS_SIMD", False)
    monkeypatch.setattr(cpu_kernels, "_MAX_TABLE_FLOATS", 8 * 100)
    model, module = rotary_model(RoPE(8)), RoPE(8)  # type: ignore[no-untyped-call]
    cpu_kernels.install(model, 2048)
    for shape, offset in (((1, 2, 5, 8), 98), ((2, 2, 1, 8), mx.array([1, 1500])), ((1, 2, 5, 12), 3)):
        x = mx.random.normal(shape)
        assert difference(model.rope(x, offset=offset), module(x, offset=offset)) < TOLERANCE


@pytest.mark.parametrize("has_simd", [True, False])
def test_models_are_changed_only_where_mlx_has_no_simd(has_simd: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_kernels, "_HAS_SIMD", has_simd)
    args = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=32,
        num_hidden_layers=1,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=50,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model: Any = qwen3.Model(args)  # type: ignore[no-untyped-call]
    layer = model.model.layers[0]

    cpu_kernels.install(model, 64)

    uses = {
        type(module).__call__.__globals__.get(name)
        for module, name in ((layer.mlp, "swiglu"), (layer.self_attn, "scaled_dot_product_attention"))
    }
    assert uses == (
        {activations.swiglu, base.scaled_dot_product_attention}
        if has_simd
        else {cpu_kernels.swiglu, cpu_kernels.attention}
    )
    assert type(layer.self_attn.rope) is RoPE if has_simd else isinstance(layer.self_attn.rope, RoPE)
    assert qwen3.MLP.__call__.__globals__["swiglu"] is activations.swiglu
