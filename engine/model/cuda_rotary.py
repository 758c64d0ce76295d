"""Rotate few tokens each of many rows on CUDA, where MLX 0.32 cannot launch its rotary kernel for them.

With at most 16 rotary dimensions, as in Pythia, a block of that kernel gets more than 64 rows deep, which CUDA refuses:
the forward pass fails with "cudaGraphAddKernelNode failed: invalid argument", and the engine with it. A block has 1,024
threads, for pairs of dimensions, then tokens, then rows: with so much padding beside the tokens that 16 threads are for
pairs and tokens, 64 are left for rows.
"""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.positional_encoding import RoPE

from scorepool.engine.model.device import gpu_kind

_NUM_PAIRS = 16  # of pairs of dimensions and tokens: with as many, a block is not too deep


def install(model: Any) -> None:
    """Pad what the rotary modules of few dimensions rotate. Does nothing but on CUDA."""
    if gpu_kind() != "cuda":
        return
    for module in model.modules():
        if isinstance(module, RoPE) or hasattr(module, "_freqs"):
            num_pairs = _num_pairs(module)
            if num_pairs < _NUM_PAIRS:
                module.__class__ = padding(type(module), num_pairs)


def padding(kind: Any, num_pairs: int) -> Any:
    """Return a subclass of a rotary module's class that pads rows of few tokens while it rotates them."""
    min_length = _NUM_PAIRS >> (num_pairs.bit_length() - 1)  # threads are counted in powers of two

    class PaddingRoPE(kind):  # type: ignore[misc]
        def __call__(self, x: mx.array, offset: Any = 0) -> Any:
            length = x.shape[-2]
            if length >= min_length or x.shape[0] == 1:
                return kind.__call__(self, x, offset)
            padded = mx.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, min_length - length), (0, 0)])
            return kind.__call__(self, padded, offset)[..., :length, :]

    return PaddingRoPE


def _num_pairs(module: Any) -> int:
    freqs = getattr(module, "_freqs", None)
    return int(module.dims) // 2 if freqs is None else int(freqs.size)
