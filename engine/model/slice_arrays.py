"""Slices as arrays: what goes into a forward pass of the model, and what is kept of what comes out."""

from dataclasses import replace
from typing import Any

import mlx.core as mx

from scorepool.engine.model import kv_cache
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.kv_cache import Cache
from scorepool.engine.scheduling.prefix_cache import Prefix
from scorepool.engine.scheduling.slice import Slice


def token_ids_of(slice_: Slice) -> list[int]:
    """Return the tokens of a slice that has no proposed ones."""
    if (kept := slice_.kept) is not None:
        return [slice_.sequence.token_ids[position] for position in kept]
    return slice_.sequence.token_ids[slice_.start : slice_.end]


def forward_row(backbone: BackboneAndHead, slice_: Slice, cache: Cache) -> mx.array:
    """Return hidden states [1, length, width]."""
    if (kept := slice_.kept) is not None:
        kv_cache.set_positions(cache, kept)
        hidden = backbone.forward_hidden(mx.array([token_ids_of(slice_)]), cache, [slice_.sequence])
        kv_cache.set_next_position(cache, slice_.end)
        return hidden
    return backbone.forward_hidden(mx.array([token_ids_of(slice_)]), cache, [slice_.sequence], [slice_.start])


def initial_cache(slice_: Slice, model: Any) -> Cache:
    """Return the cache with which a sequence begins."""
    if slice_.sequence.kept is not None:
        return kv_cache.merge([kv_cache.new(model)])  # whose positions are not those of its slots
    return kv_cache.clone(slice_.cached_prefix.cache) if slice_.cached_prefix else kv_cache.new(model)


def cut(slice_: Slice, max_tokens: int) -> list[Slice]:
    """Cut a slice into pieces; the first keeps the cached prefix."""
    pieces: list[Slice] = []
    while slice_.num_tokens:
        pieces.append(slice_.first(max_tokens))
        slice_ = replace(slice_, start=pieces[-1].end, cached_prefix=None)
    return pieces


def fill_prefix(prefix: Prefix, cache: Cache, last_hidden: mx.array) -> Cache:
    """Store in the prefix what sequences continue from, and return its compact cache. `last_hidden` [1, width]."""
    compact = kv_cache.compact(cache)
    prefix.cache, prefix.num_bytes = compact, kv_cache.num_bytes(compact)
    prefix.last_hidden = mx.contiguous(last_hidden)
    mx.async_eval(prefix.last_hidden)  # until it is computed it holds the hidden states of the whole slice
    return compact


def select_predictors(slices: list[Slice], hidden: mx.array | None) -> mx.array:
    """Return [n, width]: the rows of the predictors.

    hidden [rows, length, width] begins where each slice does; None if all slices are empty.
    """
    last_hidden = [one.cached_prefix.last_hidden for one in slices if one.cached_prefix and one.is_predicted_by_prefix]
    states = last_hidden if hidden is None else [*last_hidden, hidden.reshape(-1, hidden.shape[-1])]
    length = 0 if hidden is None else hidden.shape[1]
    index: list[int] = []
    num_from_prefix = 0
    for row, slice_ in enumerate(slices):
        for position in slice_.predictors:
            if position < slice_.start:
                index.append(num_from_prefix)
                num_from_prefix += 1
            else:
                index.append(len(last_hidden) + row * length + slice_.row_of(position))
    return mx.concatenate(states)[mx.array(index, dtype=mx.int32)]


def start_computing(hidden: mx.array, cache: Cache) -> mx.array:
    """Start computing hidden states together with the caches that are kept."""
    mx.async_eval(hidden, kv_cache.arrays(cache))
    return hidden
