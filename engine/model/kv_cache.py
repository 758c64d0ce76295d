"""The KV caches of mlx-lm 0.32 as this engine uses them. No other file but kv_rollback.py touches their internals.

The cache of a sequence is a list with one cache per layer. The cache of a computed prefix is kept as such a list, and
sequences continue from it in one of three ways:

    clone       into a cache of the sequence's own, which then grows
    merge       with others into one of mlx-lm's batch caches, for sequences that generate
    as_shared   as `SharedPrefixKV`, for one forward pass that keeps nothing: the peak is the keys of one layer

To support a new kind of cache, change `can_be_shared`, `_compact`, `_as_shared` and `cost`.
"""

from collections.abc import Iterable
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

Cache = list[Any]  # one of mlx-lm's caches per layer
TOKEN_AXIS = 2  # of keys and values


def new(model: Any) -> Cache:
    """Make the empty cache of one sequence. Caches of chunks cannot be batched; llama4.py needs none."""
    cache: Cache = make_prompt_cache(model)
    return [KVCache() if type(layer) is ChunkedKVCache else layer for layer in cache]


def can_be_shared(cache: Cache) -> bool:
    """True if several sequences can continue from this cache: every layer's kind can be cloned and shared."""
    return bool(cache) and all(
        type(layer) in (KVCache, ArraysCache) or (type(layer) is RotatingKVCache and layer.keep == 0)
        for layer in flat(cache)
    )


def windows(cache: Cache) -> list[int | None]:
    """Return the sliding window of each layer in tokens; None for a layer without one."""
    return [layer.max_size if isinstance(layer, RotatingKVCache) else None for layer in cache]


def smallest_window(cache: Cache) -> int | None:
    """Return the shortest sliding window of all layers, in tokens; None if every layer attends to all tokens."""
    return min((layer.max_size for layer in flat(cache) if isinstance(layer, RotatingKVCache)), default=None)


def kind_of(layer: Any) -> object:
    """Return the kind of a layer's cache: its class and, if it slides, its window."""
    return type(layer), getattr(layer, "max_size", None)


def append_zeros(layer: Any, hidden: mx.array) -> None:
    """Give a layer's cache as many tokens as hidden [rows, length, width] has, of zeros. Ignores what is no cache."""
    rows, length, _ = hidden.shape
    if isinstance(layer, CacheList):
        for part in layer.caches:
            append_zeros(part, hidden)
    elif isinstance(layer, ArraysCache):
        for index, state in enumerate(layer.cache):
            layer[index] = mx.zeros((rows, 1), hidden.dtype) if state is None else state
        layer.advance(length)
    elif hasattr(layer, "update_and_fetch"):
        zeros = mx.zeros((rows, 1, length, 1), hidden.dtype)
        layer.update_and_fetch(zeros, zeros)


def clone(cache: Cache) -> Cache:
    """Copy a cache. The arrays are shared until one of the two is written to; the other does not see the write."""
    return [type(layer).from_state(tree_map(_own_handle, layer.state)) for layer in cache]


def compact(cache: Cache) -> Cache:
    """Free the spare room that a cache keeps to grow into, and the larger array of which it is a slice.

    The original must not be used afterwards.
    """
    return [_compact(layer) for layer in cache]


def save(path: Path, cache: Cache, last_hidden: mx.array, metadata: dict[str, str]) -> None:
    """Write a cache, and the hidden state [1, width] of its last token, as a file of safetensors. Waits for both."""
    last = ArraysCache(1)
    last[0] = last_hidden
    save_prompt_cache(str(path), [*cache, last], metadata)


def load(path: Path) -> tuple[Cache, mx.array, dict[str, str]]:
    """Read what `save` has written; arrays are read when they are evaluated. Raises many errors for another file."""
    (*cache, last), metadata = load_prompt_cache(str(path), return_metadata=True)
    if type(last) is not ArraysCache:
        raise ValueError("it ends without a hidden state")
    return cache, last[0], metadata


def layout(cache: Cache) -> list[object]:
    """Describe each layer's cache: its kind, dtypes, and shapes but for the number of tokens."""
    return [(kind_of(layer), *_shapes(layer)) for layer in flat(cache)]


def has_tokens(cache: Cache, length: int) -> bool:
    """True if every layer's cache, which has the model's layout, is that of a sequence of `length` tokens."""
    return all(_has_tokens(layer, length) for layer in flat(cache) if not isinstance(layer, ArraysCache))


def merge(caches: list[Cache]) -> Cache:
    """Merge the caches of single sequences into one of mlx-lm's batch caches per layer."""
    return [_merge(list(layers)) for layers in zip(*caches, strict=True)]


def begin_right_padding(cache: Cache, lengths: list[int]) -> None:
    """Announce the tokens of each row in the next forward pass of a merged cache: shorter rows are right-padded."""
    longest = max(lengths)
    for layer in cache:
        layer.prepare(lengths=lengths, right_padding=[longest - length for length in lengths])


def end_right_padding(cache: Cache) -> None:
    """Turn the right padding of the last forward pass into left padding, so that rows can decode."""
    for layer in cache:
        layer.finalize()


def extend(cache: Cache, other: Cache) -> None:
    """Append the rows of another merged cache."""
    for layer, others in zip(cache, other, strict=True):
        layer.extend(others)


def keep_rows(cache: Cache, rows: list[int]) -> None:
    """Drop every row of a merged cache but these."""
    for layer in cache:
        layer.filter(mx.array(rows))


def take_row(cache: Cache, row: int) -> Cache:
    """Return the cache of one row of a merged cache, without its padding. `merge` makes one of such again."""
    taken: Cache = [layer.extract(row) for layer in cache]
    if isinstance(cache[0], UnpaddedBatchKVCache) and (gap := cache[0].offset[row].item() - taken[0].offset):
        taken = [GappedKVCache(layer, gap) for layer in taken]
    return taken


class StepOffsets(mx.array):
    """The positions [rows] of the next tokens, one object for all layers, and what they derive from it."""

    derived: dict[object, Any]


def set_padding(cache: Cache, lengths: set[int]) -> None:
    """Tell a merged cache how many tokens its rows have, before a step that decodes them."""
    offsets: dict[int, StepOffsets] = {}
    for layer in cache:
        if type(layer) is UnpaddedBatchKVCache:
            layer.is_padded = lengths != {layer._idx}
            if layer._idx not in offsets:
                offsets[layer._idx] = StepOffsets(layer.offset)
                offsets[layer._idx].derived = {}
            layer.offset = offsets[layer._idx]


def set_positions(cache: Cache, positions: list[int]) -> None:
    """Tell the merged cache of one row the positions of the next tokens, for rope_positions.py."""
    for layer in cache:
        layer.offset = mx.array([positions])


def set_next_position(cache: Cache, position: int) -> None:
    """Tell the merged cache of one row that the next token is that of `position`, however many it holds."""
    for layer in cache:
        layer.offset = mx.array([position])


def as_shared(caches: list[Cache]) -> Cache:
    """Combine the caches that rows continue from, one a row, for one forward pass that keeps nothing."""
    return [_as_shared(list(layers)) for layers in zip(*caches, strict=True)]


def arrays(cache: Cache) -> list[mx.array]:
    """List the arrays to evaluate."""
    found: list[tuple[str, Any]] = tree_flatten([layer.state for layer in cache])  # type: ignore[assignment]
    return [value for _, value in found if isinstance(value, mx.array)]


def num_bytes(cache: Cache) -> int:
    """Count the bytes of all arrays."""
    return sum(array.nbytes for array in arrays(cache))


def cost(cache: Cache) -> tuple[int, int]:
    """Return the bytes per token, and the bytes per sequence whatever its length, of a cache that is not empty."""
    per_token = fixed = 0
    for layer in flat(cache):
        if type(layer) is RotatingKVCache:
            fixed += layer.nbytes // layer.keys.shape[2] * layer.max_size  # type: ignore[union-attr]
        elif hasattr(layer, "keys"):
            per_token += layer.nbytes // layer.keys.shape[2]
        else:
            fixed += layer.nbytes
    return per_token, fixed


def num_keys(layer: Any) -> int:
    """Count the tokens of a layer's cache that keeps all of them, padding included. None has none."""
    if layer is None:
        return 0
    if isinstance(layer, SharedPrefixKV):
        return layer._num_keys
    return int(layer._idx if isinstance(layer, BatchKVCache) else layer.offset)


def key_positions(layer: Any, length: int) -> mx.array:
    """Return [rows or 1, keys]: the position in its row of each key that the next `length` tokens can attend to.

    The last `length` are those of the tokens themselves. Padding has other positions than any token that sees it.
    """
    slots = mx.arange(num_keys(layer) + length)[None]
    padding: mx.array | None = getattr(layer, "left_padding", getattr(layer, "_left_padding", None))
    return slots if padding is None else slots - padding[:, None]


def update(layer: Any, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Append keys and values [rows, heads, length, width] to a layer's cache, if there is one, and return all."""
    if layer is None:
        return keys, values
    updated: tuple[mx.array, mx.array] = layer.update_and_fetch(keys, values)
    return updated


def causal_mask(layer: Any, length: int) -> mx.array:
    """Return a mask that broadcasts to [rows, heads, length, keys]: True where a token may attend to a key."""
    make_mask = create_causal_mask if layer is None else partial(layer.make_mask, return_array=True)
    mask: mx.array | None = make_mask(length, window_size=None)
    return mask if mask is not None else mx.ones((1, num_keys(layer) + 1), mx.bool_)


def slide(mask: Any, layer: Any, length: int, window: int) -> Any:
    """Return the mask with which the next `length` tokens attend to at most `window` tokens: `mask` while all fit."""
    if num_keys(layer) + length <= window:
        return mask
    if layer is None:
        return create_causal_mask(length, window_size=window)
    return layer.make_mask(length, return_array=True, window_size=window)


def look_ahead(mask: Any, layer: Any, ahead: mx.array) -> Any:
    """Return the mask of the next tokens, with which they also attend to those of `ahead` [rows, 1, length, length]."""
    length = ahead.shape[-1]
    if mask is None or isinstance(mask, str):
        mask = create_causal_mask(length, num_keys(layer))
    before = mask.shape[-1] - length
    return mask | mx.pad(ahead, [(0, 0), (0, 0), (0, 0), (before, 0)])


class UnpaddedBatchKVCache(BatchKVCache):
    """A batch KV cache that makes no mask for a decode step without padding: each row attends to all of its keys."""

    is_padded = True  # some row may be padded

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> Any:  # noqa: N803
        window = kwargs.get("window_size")
        sees_all = not self.is_padded and (window is None or self._idx < window)
        return None if N == 1 and sees_all and not return_array else super().make_mask(N, return_array, **kwargs)


class GappedKVCache(KVCache):
    """The cache of one row that has left out tokens of its prompt: `gap` of them."""

    def __init__(self, cache: KVCache, gap: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # mlx-lm's
        self.keys, self.values, self.offset, self.gap = cache.keys, cache.values, cache.offset, gap


class SharedPrefixKV:
    """Keys and values of cached prefixes, shared by the rows of one forward pass. Each row continues from one prefix.

    Rows of the same prefix are adjacent. Shorter prefixes are padded on the left:

        . . p p p | n n        offsets     3, 5    position of each row's first new token
        q q q q q | n n        num_keys    5       keys before the new ones, padding included
    """

    def __init__(self, layers: list[KVCache | RotatingKVCache]) -> None:
        self._max_size: int | None = getattr(layers[0], "max_size", None)
        runs: list[tuple[Any, int]] = []
        for layer in layers:
            if runs and runs[-1][0] is layer:
                runs[-1] = (layer, runs[-1][1] + 1)
            else:
                runs.append((layer, 1))
        visible = [_visible(layer) for layer, _ in runs]
        lengths = [keys.shape[2] for (keys, _), (_, rows) in zip(visible, runs, strict=True) for _ in range(rows)]
        self._num_keys = max(lengths)
        pads = [self._num_keys - length for length in lengths]
        self._left_padding = mx.array(pads) if any(pads) else None
        offsets = {layer.offset for layer, _ in runs}
        self.offset: int | mx.array = (
            offsets.pop() if len(offsets) == 1 else mx.array([layer.offset for layer in layers])
        )
        self._keys = [self._repeat(keys, rows) for (keys, _), (_, rows) in zip(visible, runs, strict=True)]
        self._values = [self._repeat(values, rows) for (_, values), (_, rows) in zip(visible, runs, strict=True)]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values  # of the new tokens; deepseek_v32 adds dependencies to them
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all keys and values again, for a layer that attends to those of another."""
        return _append(self._keys, self.keys), _append(self._values, self.values)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:  # noqa: N803
        window = window_size or self._max_size
        is_whole = window is None or self._num_keys + N <= window
        if self._left_padding is None and is_whole and not return_array:
            return None if N == 1 else "causal"
        return create_causal_mask(N, self._num_keys, window_size=window, left_padding=self._left_padding)

    @property
    def state(self) -> list[mx.array]:
        """Return nothing, because nothing is kept after the forward pass."""
        return []

    def _repeat(self, prefix: mx.array, rows: int) -> mx.array:
        left = self._num_keys - prefix.shape[2]
        padded = mx.pad(prefix, [(0, 0), (0, 0), (left, 0), (0, 0)]) if left else prefix
        return mx.broadcast_to(padded, (rows, *padded.shape[1:]))


def _append(prefixes: list[mx.array], new: mx.array) -> mx.array:
    whole = prefixes[0] if len(prefixes) == 1 else mx.concatenate(prefixes)
    return mx.concatenate([whole, new], axis=2)


def _visible(layer: Any) -> tuple[mx.array, mx.array]:
    """Return keys and values [1, heads, tokens, width] that a following token may attend to, in order."""
    if type(layer) is RotatingKVCache:
        length = min(layer.offset, layer.max_size - 1)
        keys, values = layer._temporal_order(layer.keys), layer._temporal_order(layer.values)
        return keys[..., keys.shape[2] - length :, :], values[..., values.shape[2] - length :, :]
    return layer.keys[..., : layer.offset, :], layer.values[..., : layer.offset, :]


def flat(cache: Iterable[Any]) -> list[Any]:
    """List the caches of all layers, with those inside a CacheList in its place."""
    return [one for layer in cache for one in (flat(layer.caches) if type(layer) is CacheList else [layer])]


def _compact(layer: Any) -> Any:
    if type(layer) is CacheList:
        return CacheList(*map(_compact, layer.caches))
    if type(layer) is KVCache and not layer.empty():
        layer.keys, layer.values = map(mx.contiguous, _visible(layer))
    if type(layer) is ArraysCache:
        layer.cache = [array if array is None else mx.contiguous(array) for array in layer.cache]
    return layer


def _merge(layers: list[Any]) -> Any:
    if any(isinstance(layer, GappedKVCache) for layer in layers):
        merged = UnpaddedBatchKVCache.merge(layers)  # type: ignore[no-untyped-call] # mlx-lm's
        merged.offset += mx.array([getattr(layer, "gap", 0) for layer in layers])
        return merged
    if type(layers[0]) is not KVCache:
        return layers[0].merge(layers)
    if all(layer.empty() for layer in layers):
        return UnpaddedBatchKVCache([0] * len(layers))
    return UnpaddedBatchKVCache.merge(layers)  # type: ignore[no-untyped-call] # mlx-lm's


def _as_shared(layers: list[Any]) -> Any:
    kind = type(layers[0])
    if kind is CacheList:
        return CacheList(*(_as_shared(list(inner)) for inner in zip(*(layer.caches for layer in layers), strict=True)))
    if kind is ArraysCache:
        joined = ArraysCache(len(layers[0].cache))
        for index, rows in enumerate(zip(*(layer.cache for layer in layers), strict=True)):
            joined[index] = mx.concatenate(list(rows)) if len(rows) > 1 else rows[0]
        return joined
    return SharedPrefixKV(layers)


def _own_handle(value: Any) -> Any:
    """Copy the handle of an array: an in-place write in mlx rebinds the Python object and leaves the memory alone."""
    return copy(value) if isinstance(value, mx.array) else value


def _shapes(layer: Any) -> list[object]:
    leaves: list[tuple[str, Any]] = tree_flatten(layer.state)  # type: ignore[assignment]
    grows = not isinstance(layer, ArraysCache)
    return [
        (leaf.dtype, [size for axis, size in enumerate(leaf.shape) if not grows or axis != TOKEN_AXIS])
        if isinstance(leaf, mx.array)
        else type(leaf)
        for _, leaf in leaves
    ]


def _has_tokens(layer: Any, length: int) -> bool:
    num_keys, num_values = layer.keys.shape[TOKEN_AXIS], layer.values.shape[TOKEN_AXIS]
    fits = num_keys >= length  # room to grow into may be left
    if type(layer) is RotatingKVCache:
        visible = min(length, layer.max_size - 1)
        fits = visible <= num_keys and layer.keep == 0 and 0 <= layer._idx <= num_keys
    return bool(fits and num_values == num_keys and layer.offset == length)
