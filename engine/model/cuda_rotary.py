"""Rotate one token each of many rows on CUDA, where MLX 0.32 cannot launch its rotary kernel for them.

With at most 16 rotary dimensions, as in Pythia, a block of that kernel gets 128 rows deep, and CUDA allows 64: the
forward pass fails with "cudaGraphAddKernelNode failed: invalid argument", and the engine with it. Beside a second token
of each row the blocks have another shape; what that token rotates to is dropped.
"""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.positional_encoding import RoPE

from scorepool.engine.model.device import gpu_kind

_MAX_DIMS = 16


def install(model: Any) -> None:
    """Give the rotary modules of few dimensions a second token where they have one. Does nothing but on CUDA."""
    if gpu_kind() != "cuda":
        return
    for module in model.modules():
        if (isinstance(module, RoPE) or hasattr(module, "_freqs")) and _num_dims(module) <= _MAX_DIMS:
            module.__class__ = in_pairs(type(module))


def in_pairs(kind: Any) -> Any:
    """Return a subclass of a rotary module's class that rotates two tokens of each row where it is given one."""

    class PairedRoPE(kind):  # type: ignore[misc]
        def __call__(self, x: mx.array, offset: Any = 0) -> Any:
            if x.ndim != 4 or x.shape[0] == 1 or x.shape[2] > 1:
                return kind.__call__(self, x, offset)
            return kind.__call__(self, mx.repeat(x, 2, axis=2), offset)[:, :, :1]

    return PairedRoPE


def _num_dims(module: Any) -> int:
    freqs = getattr(module, "_freqs", None)
    return int(module.dims) if freqs is None else 2 * int(freqs.size)
