"""Compute the attention of vision towers in blocks of patches on a CPU, where MLX has no fused kernel for it.

All patches of an image attend to each other. An image of 1,540 x 1,540 pixels has 12,100 patches in Pixtral, and the
weights of 16 heads 9 GB in float32, which MLX holds at once. Rows of weights do not depend on each other, so a block of
them at a time gives the same numbers.
"""

from types import FunctionType, SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from scorepool.engine.model.patch_globals import patch_globals, replace_globals

MAX_BYTES = 2**28  # of the weights of a block
_FUSED, _PADDED = "scaled_dot_product_attention", "ensure_fused_sdpa"  # what modules of mlx-vlm call


def install(tower: Module) -> None:
    """Let a tower attend in blocks, where that is needed."""
    if mx.default_device() != mx.cpu:
        return
    fast = SimpleNamespace(**{**vars(mx.fast), _FUSED: attention})
    for kind in {type(module) for module in tower.modules()}:
        call: Any = kind.__call__
        if not isinstance(call, FunctionType):
            continue
        names = call.__code__.co_names
        if _FUSED in names and call.__globals__.get("mx") is mx:
            patch_globals(tower, kind, "mx", fast=fast)
        elif _PADDED in names and _PADDED in call.__globals__:
            replace_globals(tower, kind, **{_PADDED: attention})


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | None = None) -> mx.array:
    """Return what `mx.fast.scaled_dot_product_attention` does, of [rows, heads, length, width]."""
    rows, heads, length, _ = q.shape
    size = max(1, MAX_BYTES // max(1, 4 * rows * heads * k.shape[2]))
    if size >= length:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    blocks: list[mx.array] = []
    for start in range(0, length, size):
        own = mask if mask is None or mask.shape[-2] == 1 else mask[..., start : start + size, :]
        block = q[:, :, start : start + size]
        blocks.append(mx.fast.scaled_dot_product_attention(block, k, v, scale=scale, mask=own))
        mx.eval(blocks[-1])  # otherwise the weights of all blocks take their memory at once
    return mx.concatenate(blocks, axis=2)
