"""Drop the last tokens of each row of a merged cache: those that were proposed and rejected.

    layer               keeps          drops
    KVCache             all tokens     the last ones, always
    RotatingKVCache     a window       the last ones of a step of several tokens, which has kept the window before them
    ArraysCache         a state        nothing: the state before the step is kept beside, and goes through the kept ones

Like kv_cache.py, this file touches the internals of mlx-lm's caches.
"""

from copy import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, BatchRotatingKVCache, CacheList, KVCache, RotatingKVCache

from scorepool.engine.model import kv_cache
from scorepool.engine.model.kv_cache import Cache

SPARE_PADDING = 64  # tokens of left padding common to all rows, which are dropped: a copy costs more than a few


def can_drop_last(cache: Cache) -> bool:
    """True if the last tokens of each row can be dropped: no layer keeps a state, or a window, that they changed."""
    return bool(cache) and all(type(layer) is KVCache for layer in kv_cache.flat(cache))


def can_drop_step(cache: Cache) -> bool:
    """True if the last tokens of each row can be dropped after one step of several tokens."""
    return bool(cache) and all(
        type(layer) in (KVCache, ArraysCache) or (type(layer) is RotatingKVCache and layer.keep == 0)
        for layer in kv_cache.flat(cache)
    )


def put_in_order(cache: Cache) -> None:
    """Let the layers of a merged cache that keep a window begin with their oldest token, before a step of several.

    mlx-lm makes the step's mask before it puts them in order, and hides a token of rows that are padded otherwise.
    """
    for layer in kv_cache.flat(cache):
        if type(layer) is BatchRotatingKVCache:
            layer._temporal_order()


def drop_last(cache: Cache, counts: list[int]) -> None:
    """Drop the last tokens of a merged cache, `counts[i]` of row i. Rows that drop more get left padding.

    Tokens of one step, where a layer keeps a window. States stay as they are.
    """
    common = min(counts)
    padding = [count - common for count in counts]
    for layer in kv_cache.flat(cache):
        if type(layer) is ArraysCache:
            continue
        if type(layer) is BatchRotatingKVCache:
            _drop_last_of_window(layer, common, padding)
            continue
        layer.trim(common)
        if any(padding):
            layer.prepare(right_padding=padding)
            layer.finalize()
    if any(padding):
        _drop_left_padding(cache)


def drop_last_of_row(cache: Cache, count: int) -> None:
    """Drop the last tokens of the cache of one row; see `drop_last`."""
    for layer in kv_cache.flat(cache):
        if type(layer) is RotatingKVCache:
            end = layer._idx - count
            layer.keys, layer.values = layer.keys[..., :end, :], layer.values[..., :end, :]  # type: ignore[index]
            layer.offset, layer._idx = layer.offset - count, end
        elif type(layer) is not ArraysCache:
            layer.trim(count)


def copy_states(cache: Cache) -> Cache:
    """Copy the layers of a merged cache that keep a state; see `kv_cache.clone`."""
    return kv_cache.clone([layer for layer in kv_cache.flat(cache) if type(layer) is ArraysCache])


def rows_before(cache: Cache, num_tokens: int, rows: list[int], states: Cache, state_rows: list[int]) -> Cache:
    """Copy rows of a merged cache as they were before its last step, of `num_tokens` a row.

    states      what `copy_states` returned before the step; `state_rows` are the numbers that the rows had then
    """
    saved = iter(states)

    def before(layer: Any) -> Any:
        if type(layer) is CacheList:
            return CacheList(*map(before, layer.caches))
        is_state = type(layer) is ArraysCache
        copied = copy(next(saved) if is_state else layer)
        copied.filter(mx.array(state_rows if is_state else rows))
        if type(copied) is BatchRotatingKVCache:
            _drop_last_of_window(copied, num_tokens, [])
            _forget_length(copied)
        elif not is_state:
            copied.trim(num_tokens)
        return copied

    return [before(layer) for layer in cache]


def replace_states(cache: Cache, rows: list[int], other: Cache) -> None:
    """Give rows of a merged cache the states of the rows of another one."""
    index = mx.array(rows)
    for layer, new in zip(kv_cache.flat(cache), kv_cache.flat(other), strict=True):
        for number, state in enumerate(new.cache if type(layer) is ArraysCache else ()):
            if state is not None:
                layer[number][index] = state


def _drop_last_of_window(layer: Any, common: int, padding: list[int]) -> None:
    """Drop the last tokens of a layer with a window after a step of several tokens, which has put it in order."""
    end = layer._idx - common
    layer.keys, layer.values = layer.keys[..., :end, :], layer.values[..., :end, :]
    layer._idx, layer._offset, layer.offset = end, layer._offset - common, layer.offset - common
    if any(padding):
        layer._lengths = layer.offset - mx.array(padding)
        layer.finalize()


def _forget_length(layer: Any) -> None:
    """Let a layer with a window take what it holds for all of its tokens: a step of one token may have to grow it."""
    layer._offset = layer.keys.shape[2]


def _drop_left_padding(cache: Cache) -> None:
    """Drop the left padding that all rows of a merged cache have, if it is much."""
    layers = [layer for layer in kv_cache.flat(cache) if hasattr(layer, "_right_padding")]
    spare = min(layers[0].left_padding.tolist()) if layers else 0
    if spare >= SPARE_PADDING:
        for layer in layers:
            layer.keys, layer.values = layer.keys[..., spare:, :], layer.values[..., spare:, :]
            layer.left_padding, layer._idx = layer.left_padding - spare, layer._idx - spare
