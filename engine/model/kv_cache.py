"""mlx-lm's caches of one row (0.32), as this engine uses them. The only file that touches their internals.

A row's cache is a list, one cache a layer. What a computed prefix leaves behind is kept as such a list, and
rows go on from it in one of three ways:

    copied    into a cache of the row's own, which then grows
    merged    with others into one of mlx-lm's batch caches, for rows that generate
    lent      as `SharedPrefixKV`, for one forward that keeps nothing: the peak is the keys of one layer, not of all
"""

from collections.abc import Iterable
from copy import copy
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

Cache = list[Any]  # one of mlx-lm's a layer


def new(model: Any) -> Cache:
    cache: Cache = make_prompt_cache(model)
    return cache


def can_be_shared(cache: Cache) -> bool:
    """Every layer's cache is of a kind that can be lent and copied."""
    return bool(cache) and all(
        type(layer) in (KVCache, ArraysCache) or (type(layer) is RotatingKVCache and layer.keep == 0)
        for layer in _flat(cache)
    )


def smallest_window(cache: Cache) -> int | None:
    """Tokens that the layer with the least memory of them attends to; None: all attend to all."""
    return min((layer.max_size for layer in _flat(cache) if isinstance(layer, RotatingKVCache)), default=None)


def copied(cache: Cache) -> Cache:
    """What is written to the copy is not seen in the original: the arrays are shared until then."""
    return [type(layer).from_state(tree_map(_own_handle, layer.state)) for layer in cache]


def compact(cache: Cache) -> Cache:
    """Without the room that a cache keeps to grow into, and without the whole of which it is a slice.

    The original is not to be used any more.
    """
    return [_compact(layer) for layer in cache]


def merged(caches: list[Cache]) -> Cache:
    """Caches of rows as one of mlx-lm's batch caches a layer."""
    return [_merged(list(layers)) for layers in zip(*caches, strict=True)]


def set_padding(cache: Cache, lengths: set[int]) -> None:
    """Of the rows of a merged cache, in tokens, before a step that decodes them."""
    for layer in cache:
        if type(layer) is UnpaddedBatchKVCache:
            layer.is_padded = lengths != {layer._idx}


def as_shared(caches: list[Cache]) -> Cache:
    """For one forward of rows that go on from these, one a row, and keep nothing."""
    return [_lent(list(layers)) for layers in zip(*caches, strict=True)]


def arrays(cache: Cache) -> list[mx.array]:
    """All that there is to evaluate."""
    found: list[tuple[str, Any]] = tree_flatten([layer.state for layer in cache])  # type: ignore[assignment]
    return [value for _, value in found if isinstance(value, mx.array)]


def num_bytes(cache: Cache) -> int:
    return sum(array.nbytes for array in arrays(cache))


def cost(cache: Cache) -> tuple[int, int]:
    """Bytes a token, and bytes a row whatever its length, of a cache that some token went through."""
    per_token = fixed = 0
    for layer in _flat(cache):
        if type(layer) is RotatingKVCache:
            fixed += layer.nbytes // layer.keys.shape[2] * layer.max_size  # type: ignore[union-attr]
        elif hasattr(layer, "keys"):
            per_token += layer.nbytes // layer.keys.shape[2]
        else:
            fixed += layer.nbytes
    return per_token, fixed


class UnpaddedBatchKVCache(BatchKVCache):
    """Makes no mask for a step that decodes rows of which none is padded: each sees all that it has."""

    is_padded = True  # some row may be

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> Any:  # noqa: N803
        window = kwargs.get("window_size")
        sees_all = not self.is_padded and (window is None or self._idx < window)
        return None if N == 1 and sees_all and not return_array else super().make_mask(N, return_array, **kwargs)


class SharedPrefixKV:
    """Keys and values of rows that begin with a prefix each, lent to one forward.

    Rows of one prefix follow each other. Shorter prefixes are padded on the left:

        . . p p p | n n        offsets     3, 5    where each row's new tokens stand
        q q q q q | n n        num_keys    5       before the new ones, padding included
    """

    def __init__(self, layers: list[KVCache | RotatingKVCache]) -> None:
        self._max_size: int | None = getattr(layers[0], "max_size", None)
        runs: list[tuple[Any, int]] = []
        for layer in layers:
            if runs and runs[-1][0] is layer:
                runs[-1] = (layer, runs[-1][1] + 1)
            else:
                runs.append((layer, 1))
        kept = [_kept(layer) for layer, _ in runs]
        lengths = [keys.shape[2] for (keys, _), (_, rows) in zip(kept, runs, strict=True) for _ in range(rows)]
        self._num_keys = max(lengths)
        pads = [self._num_keys - length for length in lengths]
        self._left_padding = mx.array(pads) if any(pads) else None
        offsets = {layer.offset for layer, _ in runs}
        self.offset: int | mx.array = (
            offsets.pop() if len(offsets) == 1 else mx.array([layer.offset for layer in layers])
        )
        self._keys = [self._of_rows(keys, rows) for (keys, _), (_, rows) in zip(kept, runs, strict=True)]
        self._values = [self._of_rows(values, rows) for (_, values), (_, rows) in zip(kept, runs, strict=True)]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return _joined(self._keys, keys), _joined(self._values, values)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:  # noqa: N803
        window = window_size or self._max_size
        is_whole = window is None or self._num_keys + N <= window
        if self._left_padding is None and is_whole and not return_array:
            return None if N == 1 else "causal"
        return create_causal_mask(N, self._num_keys, window_size=window, left_padding=self._left_padding)

    @property
    def state(self) -> list[mx.array]:
        """Nothing is kept."""
        return []

    def _of_rows(self, prefix: mx.array, rows: int) -> mx.array:
        left = self._num_keys - prefix.shape[2]
        padded = mx.pad(prefix, [(0, 0), (0, 0), (left, 0), (0, 0)]) if left else prefix
        return mx.broadcast_to(padded, (rows, *padded.shape[1:]))


def _joined(prefixes: list[mx.array], new: mx.array) -> mx.array:
    whole = prefixes[0] if len(prefixes) == 1 else mx.concatenate(prefixes)
    return mx.concatenate([whole, new], axis=2)


def _kept(layer: Any) -> tuple[mx.array, mx.array]:
    """Keys and values [1, heads, tokens, width] that a following token may see, in order."""
    if type(layer) is RotatingKVCache:
        length = min(layer.offset, layer.max_size - 1)
        keys, values = layer._temporal_order(layer.keys), layer._temporal_order(layer.values)
        return keys[..., keys.shape[2] - length :, :], values[..., values.shape[2] - length :, :]
    return layer.keys[..., : layer.offset, :], layer.values[..., : layer.offset, :]


def _flat(cache: Iterable[Any]) -> list[Any]:
    return [part for layer in cache for part in (_flat(layer.caches) if type(layer) is CacheList else [layer])]


def _compact(layer: Any) -> Any:
    if type(layer) is CacheList:
        return CacheList(*map(_compact, layer.caches))
    if type(layer) is KVCache and not layer.empty():
        layer.keys, layer.values = (mx.contiguous(part) for part in _kept(layer))
    if type(layer) is ArraysCache:
        layer.cache = [part if part is None else mx.contiguous(part) for part in layer.cache]
    return layer


def _merged(layers: list[Any]) -> Any:
    if type(layers[0]) is not KVCache:
        return layers[0].merge(layers)
    if all(layer.empty() for layer in layers):
        return UnpaddedBatchKVCache([0] * len(layers))
    return UnpaddedBatchKVCache.merge(layers)  # type: ignore[no-untyped-call] # mlx-lm's


def _lent(layers: list[Any]) -> Any:
    kind = type(layers[0])
    if kind is CacheList:
        return CacheList(*(_lent(list(parts)) for parts in zip(*(layer.caches for layer in layers), strict=True)))
    if kind is ArraysCache:
        joined = ArraysCache(len(layers[0].cache))
        for index, parts in enumerate(zip(*(layer.cache for layer in layers), strict=True)):
            joined[index] = mx.concatenate(list(parts)) if len(parts) > 1 else parts[0]
        return joined
    return SharedPrefixKV(layers)


def _own_handle(value: Any) -> Any:
    """In-place writes of mlx change what a Python object stands for, not the memory that others read."""
    return copy(value) if isinstance(value, mx.array) else value
