"""Products with large weights on CPUs without MLX's SIMD are those of float64, whatever number of tokens there is."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from scorepool.engine.model import cpu_kernels, cpu_products

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="only the CPU's layers are replaced")

NUM_INPUTS, NUM_OUTPUTS = 1024, 1100  # a little more than MIN_WEIGHTS
TOLERANCE = 3e-6  # of the largest value: sums of 1,024 products in float32


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(NUM_INPUTS, NUM_OUTPUTS, bias=False)
        self.with_bias = nn.Linear(NUM_INPUTS, NUM_OUTPUTS)
        self.embedding = nn.Embedding(NUM_OUTPUTS, NUM_INPUTS)
        self.packed = nn.QuantizedLinear(NUM_INPUTS, NUM_OUTPUTS, bias=False, bits=4)
        self.packed_with_bias = nn.QuantizedLinear(NUM_INPUTS, NUM_OUTPUTS, bits=8)
        self.packed_with_bias.bias = mx.random.normal((NUM_OUTPUTS,))
        self.packed_embedding = nn.QuantizedEmbedding(NUM_OUTPUTS, NUM_INPUTS, bits=4)
        self.packed_floats = nn.QuantizedLinear(NUM_INPUTS, NUM_OUTPUTS, bias=False, mode="mxfp4")


NAMES = tuple(Layers().children())


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Layers:
    monkeypatch.setattr(cpu_kernels, "_HAS_SIMD", False)
    mx.random.seed(0)
    layers = Layers()
    cpu_products.install(layers)
    return layers


def exact(layer: Any, x: mx.array) -> Any:
    """Return the product in float64."""
    weight = layer.weight
    if "scales" in layer:
        sizes: dict[str, Any] = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        weight = mx.dequantize(weight, layer.scales, layer.get("biases"), **sizes).astype(mx.float32)
    bias = np.array(layer.bias) if "bias" in layer else 0.0
    return np.array(x).astype(np.float64) @ np.array(weight).astype(np.float64).T + bias


def apply(layer: Any, x: mx.array) -> mx.array:
    product: mx.array = layer.as_linear(x) if hasattr(layer, "as_linear") else layer(x)
    return product


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1), (3, 1), (1, 4), (5, 1), (2, 3), (4, 4), (1, 17), (70,)])
def test_products_are_those_of_float64(layers: Layers, name: str, shape: tuple[int, ...]):
    x = mx.random.normal((*shape, NUM_INPUTS))

    found, expected = apply(layers[name], x), exact(layers[name], x)

    assert found.shape == expected.shape
    assert np.abs(np.array(found) - expected).max() < TOLERANCE * np.abs(expected).max()
    flat = np.array(found, copy=False).reshape(-1)  # what follows may work on the memory: its elements lie in order
    assert flat.base is not None


@pytest.mark.parametrize("name", NAMES)
def test_no_token_gives_no_product_and_other_dtypes_are_left_to_mlx(layers: Layers, name: str):
    assert apply(layers[name], mx.zeros((0, 1, NUM_INPUTS))).shape == (0, 1, NUM_OUTPUTS)
    half = mx.random.normal((1, NUM_INPUTS)).astype(mx.float16)
    unchanged: Any = Layers()[name]
    unchanged.update(layers[name].parameters())
    assert mx.array_equal(apply(layers[name], half), apply(unchanged, half))


def test_large_quantised_weights_are_dequantised_in_parts(layers: Layers, monkeypatch: pytest.MonkeyPatch):
    x = mx.random.normal((7, NUM_INPUTS))
    whole = apply(layers.packed_embedding, x)
    monkeypatch.setattr(cpu_products, "_DEQUANTISED_PART", 300 * NUM_INPUTS)
    sizes: list[int] = []
    multiply = cpu_products.multiply
    monkeypatch.setattr(
        cpu_products, "multiply", lambda x, weight: (sizes.append(weight.shape[0]), multiply(x, weight))[1]
    )

    parts = apply(layers.packed_embedding, x)

    assert sizes == [300, 300, 300, 200]
    assert np.allclose(np.array(parts), np.array(whole), atol=1e-5)


def test_classes_keep_their_names_and_nothing_changes_where_mlx_has_simd(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
):
    assert [type(layers[name]).__name__ for name in NAMES] == [type(Layers()[name]).__name__ for name in NAMES]
    monkeypatch.setattr(cpu_kernels, "_HAS_SIMD", True)
    unchanged = Layers()
    kinds = [type(module) for module in unchanged.modules()]
    cpu_products.install(unchanged)
    assert [type(module) for module in unchanged.modules()] == kinds


def test_layers_of_small_weights_are_left_to_mlx():
    small = nn.Linear(8, 8)
    kind = type(small)
    cpu_products.install(small)
    assert type(small) is kind
