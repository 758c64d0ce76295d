"""Refuse weights that no trained model has: NaN, infinite, zeroed, or integers where the layer multiplies floats.

The self-test compares the model with itself on a few tokens, so it sees neither a zeroed matrix nor a NaN in an expert
that these tokens do not use.
"""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm, RMSNorm
from mlx.utils import tree_flatten

from scorepool.engine.errors import LoadError

_NORMS = (LayerNorm, RMSNorm)
_MULTIPLYING = (*_NORMS, Embedding, Linear)


def refuse_degenerate_weights(model: Any) -> None:
    """Raise LoadError for the first tensor that cannot be a trained model's."""
    modules: dict[str, Any] = dict(model.named_modules())
    weights: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    # One pass over the memory: a sum that is finite and not 0 excludes NaN, infinity and zeros.
    sums: list[float] = mx.stack([weight.sum().astype(mx.float32) for _, weight in weights]).tolist()  # type: ignore[assignment]
    for (name, weight), total in zip(weights, sums, strict=True):
        module = modules.get(name.rpartition(".")[0])
        if type(module) in _MULTIPLYING and not mx.issubdtype(weight.dtype, mx.floating):
            raise LoadError(f"the checkpoint's {name} has dtype {_name(weight.dtype)}, expected a floating-point one")
        if total == 0 and _may_not_be_zero(name, weight, module) and not weight.any().item():
            raise LoadError(f"the checkpoint's {name} is all zeros: no trained model has such a weight")
        if total - total != 0 and (fault := _non_finite(weight)):  # NaN or infinite
            raise LoadError(f"the checkpoint's {name} holds {fault} in {_name(weight.dtype)}")


def _may_not_be_zero(name: str, weight: mx.array, module: Any) -> bool:
    """True for matrices and scales, packed or not, and for the weights of plain norms. Biases may be zero."""
    leaf = name.rpartition(".")[2]
    if "bias" in leaf:
        return False
    is_matrix = sum(size > 1 for size in weight.shape) >= 2
    is_packed = leaf == "scales" or (leaf == "weight" and module is not None and "scales" in module)
    return (is_matrix and mx.issubdtype(weight.dtype, mx.floating)) or is_packed or type(module) in _NORMS


def _non_finite(weight: mx.array) -> str | None:
    """Return what is not finite. A vector may hold -inf: a head's bias excludes tokens with it."""
    if mx.isnan(weight).any().item():
        return "NaN"
    infinite = mx.isposinf(weight) if weight.ndim < 2 else mx.isinf(weight)
    return "infinite numbers" if infinite.any().item() else None


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
