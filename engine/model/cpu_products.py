"""Multiply tokens with large weights on CPUs for which MLX has no SIMD.

OpenBLAS copies a matrix into blocks before it multiplies, whatever the other one's size, unless the product is small:
a token alone takes as long as sixteen. MLX multiplies quantised weights one token at a time, an element at a time.

    1 token            NumPy multiplies the weights with the vector, as fast as they are read
    2 to 4 tokens      a part of the weights with each vector, then the next part, so that only the first vector waits
                       for memory and the others find the part in the processor's cache
    5 to 16 tokens     a part of the weights @ tokens.T, then the next part: the small matrix is the one that is copied
    quantised weights  are dequantised for 6 tokens and more, a part after the other

All of them wait for the device. Which way is taken depends on shapes alone, and exact mode has one shape.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from scorepool.engine.model import cpu_kernels

Array = npt.NDArray[np.float32]

MIN_WEIGHTS = 2**20  # of a matrix that is worth it
MAX_VECTORS = 4
MAX_TOKENS = 16
MIN_DEQUANTISED = 6  # tokens
_DEQUANTISED_PART = 2**22  # weights that are dequantised at a time: 16 MiB
_VECTORS_PART = 2**19  # weights that vectors are multiplied with in turns: 2 MiB
_MATRIX_PART = 2**20  # weights in one product of two matrices: 4 MiB


def install(model: Any) -> None:
    """Make the linear layers of a model multiply in these ways, where they are used; embeddings that are heads too."""
    if not cpu_kernels.are_used():
        return
    for module in model.modules():
        kind = _KINDS.get(type(module))
        # `bits`: quantised weights of any size may be dequantised. Small ones that are not are always left to MLX.
        if kind is not None and (hasattr(module, "bits") or module["weight"].size >= MIN_WEIGHTS):
            module.__class__ = kind


def multiply(x: mx.array, weight: mx.array) -> mx.array | None:
    """Return x @ weight.T for x [..., inputs] and weight [outputs, inputs], or None if MLX multiplies as well."""
    num_tokens = _num_tokens(x)
    is_float = x.dtype == weight.dtype == mx.float32
    if not is_float or weight.size < MIN_WEIGHTS or not 0 < num_tokens <= MAX_TOKENS:
        return None
    rows = x.reshape(num_tokens, -1)
    mx.eval(rows, weight)
    tokens, matrix = np.array(rows, copy=False), np.array(weight, copy=False)
    products = _multiply_vectors(tokens, matrix) if num_tokens <= MAX_VECTORS else _multiply_matrix(tokens, matrix)
    return mx.array(products).reshape(*x.shape[:-1], -1)


def _multiply_vectors(tokens: Array, matrix: Array) -> Array:
    products = np.empty((len(tokens), len(matrix)), np.float32)
    for part in _parts(matrix, _VECTORS_PART if len(tokens) > 1 else matrix.size):
        for token, product in zip(tokens, products, strict=True):
            np.matmul(matrix[part], token, out=product[part])
    return products


def _multiply_matrix(tokens: Array, matrix: Array) -> Array:
    columns = np.ascontiguousarray(tokens.T)
    products = np.empty((len(matrix), len(tokens)), np.float32)
    for part in _parts(matrix, _MATRIX_PART):
        np.matmul(matrix[part], columns, out=products[part])
    return np.ascontiguousarray(products.T)


def _parts(matrix: Array, size: int) -> Iterator[slice]:
    """Divide the rows of a matrix into parts of about `size` elements."""
    num_rows = max(1, size // matrix.shape[1])
    for start in range(0, len(matrix), num_rows):
        yield slice(start, start + num_rows)


def multiply_quantized(x: mx.array, layer: Any) -> mx.array | None:
    """Return x @ weight.T for a layer of quantised weights, or None if MLX multiplies as well."""
    if x.dtype != mx.float32 or _num_tokens(x) < MIN_DEQUANTISED:
        return None
    weight, scales, biases = layer["weight"], layer["scales"], layer.get("biases")
    num_outputs = max(1, _DEQUANTISED_PART // x.shape[-1])
    parts = []
    for start in range(0, weight.shape[0], num_outputs):
        part = slice(start, start + num_outputs)
        dense = mx.dequantize(
            weight[part],
            scales[part],
            None if biases is None else biases[part],
            group_size=layer.group_size,
            bits=layer.bits,
            mode=layer.mode,
        )
        dense = dense.astype(mx.float32)
        product = multiply(x, dense)
        parts.append(x @ dense.T if product is None else product)
        if num_outputs < weight.shape[0]:
            mx.eval(parts[-1])  # otherwise several parts of the weights take their memory at once
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def _num_tokens(x: mx.array) -> int:
    return x.size // x.shape[-1] if x.shape[-1] else 0


class _Linear(Linear):
    def __call__(self, x: mx.array) -> mx.array:
        product = multiply(x, self["weight"])
        return super().__call__(x) if product is None else _add_bias(product, self)


class _Embedding(Embedding):
    def as_linear(self, x: mx.array) -> mx.array:
        product = multiply(x, self["weight"])
        return super().as_linear(x) if product is None else product  # type: ignore[no-untyped-call]


class _QuantizedLinear(QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        product = multiply_quantized(x, self)
        return super().__call__(x) if product is None else _add_bias(product, self)  # type: ignore[no-untyped-call]


class _QuantizedEmbedding(QuantizedEmbedding):
    def as_linear(self, x: mx.array) -> mx.array:
        product = multiply_quantized(x, self)
        return super().as_linear(x) if product is None else product  # type: ignore[no-untyped-call]


def _add_bias(product: mx.array, layer: Any) -> mx.array:
    return product + layer["bias"] if "bias" in layer else product


_KINDS = {kind.__bases__[0]: kind for kind in (_Linear, _Embedding, _QuantizedLinear, _QuantizedEmbedding)}
for _base, _kind in _KINDS.items():
    _kind.__name__ = _kind.__qualname__ = _base.__name__  # as messages show it
