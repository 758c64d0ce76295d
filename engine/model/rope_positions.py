"""Let a model run tokens whose positions are not consecutive: those that are kept of a long prompt.

mlx-lm's attention rotates queries and keys from one offset on, that of the cache. A rotary module gets a subclass that
takes an offset [1, length], the position of each token, and rotates each as a row of its own. The mask needs nothing:
it follows the cache's slots, and kept tokens stand there in their order.

A model is tested when it is loaded. One whose positions are not rotary, or whose layers keep a state or slide, is told
apart there.
"""

from itertools import pairwise
from random import Random
from typing import Any

import mlx.core as mx
from mlx.nn.layers.positional_encoding import RoPE

from scorepool.engine.errors import describe
from scorepool.engine.model import kv_cache, kv_rollback
from scorepool.engine.model.backbone import BackboneAndHead

KEEPS_STATE = "layers of this model keep a state or a sliding window, which cannot skip tokens"
_KEPT = (0, 1, 2, 6, 7, 11, 12, 19)
_TOLERANCE = {mx.float32: 1e-4 if mx.default_device() == mx.cpu else 1e-3, mx.float16: 3e-2, mx.bfloat16: 2e-1}


def take_positions(model: Any) -> None:
    """Let the model's rotary modules take the position of each token."""
    for module in model.modules():
        if isinstance(module, RoPE) or hasattr(module, "_freqs"):
            module.__class__ = _positioned(type(module))


def find_fault(model: Any, split: BackboneAndHead, vocab_size: int) -> str | None:
    """Say why tokens of a prompt cannot be left out; None if they can.

    A few tokens with gaps between them run at once, and again run by run, each from one offset on.
    """
    if not kv_rollback.can_drop_last(kv_cache.new(model)):
        return KEEPS_STATE
    draw = Random(2)  # noqa: S311
    token_ids = [draw.randrange(vocab_size) for _ in _KEPT]
    try:
        at_once, in_runs, without_gaps = (
            _run(model, split, token_ids, pieces)
            for pieces in ([list(_KEPT)], _consecutive(_KEPT), [list(range(len(_KEPT)))])
        )
    except Exception as error:  # any: the architecture's own code on unusual offsets
        return f"this model's positions cannot have gaps: {describe(error)}"
    if not _distance(at_once, without_gaps):
        return "this model's attention has no rotary positions, so that gaps would not be seen"
    if not _distance(at_once, in_runs) <= _TOLERANCE[at_once.dtype]:
        return "this model computes other numbers for a prompt with gaps than for its parts"
    return None


def _run(model: Any, split: BackboneAndHead, token_ids: list[int], pieces: list[list[int]]) -> mx.array:
    """Return the hidden states of the last token, and of one that is generated after it [2, width]."""
    cache = kv_cache.merge([kv_cache.new(model)])
    start = 0
    for positions in pieces:
        is_run = len(pieces) > 1
        if is_run:
            kv_cache.set_next_position(cache, positions[0])
        else:
            kv_cache.set_positions(cache, positions)
        hidden = split.forward_hidden(mx.array([token_ids[start : start + len(positions)]]), cache)
        start += len(positions)
    kv_cache.set_next_position(cache, pieces[-1][-1] + 1)
    last = split.forward_hidden(mx.array([token_ids[:1]]), cache)
    both = mx.concatenate([hidden[0, -1:], last[0]])
    mx.eval(both)
    return both


def _consecutive(positions: tuple[int, ...]) -> list[list[int]]:
    runs = [[positions[0]]]
    for before, position in pairwise(positions):
        if position == before + 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs


def _distance(one: mx.array, other: mx.array) -> float:
    """Return the largest difference, as a share of the largest value."""
    difference = mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max()
    share: float = (difference / mx.abs(one.astype(mx.float32)).max()).item()  # type: ignore[assignment]
    return share


def _positioned(kind: Any) -> Any:
    """Return a subclass of a rotary module's class that takes positions [1, length] for an offset."""

    class PositionedRoPE(kind):  # type: ignore[misc]
        def __call__(self, x: mx.array, offset: Any = 0) -> Any:
            if not isinstance(offset, mx.array) or offset.ndim < 2:
                return kind.__call__(self, x, offset)
            rows = x.transpose(2, 1, 0, 3)  # [length, heads, 1, width of a head]
            return kind.__call__(self, rows, offset[0]).transpose(2, 1, 0, 3)

    return PositionedRoPE
