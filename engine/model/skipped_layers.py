"""Run a model with a few of its layers: a self-test of 28 equal layers takes as long as one of three, times nine.

A cache, a mask or a padded row goes wrong in the code of a layer, which all layers of its kind share. So the self-test
runs the first two layers of each kind, because masks and offsets are often made for the first, and the last, because
some architectures let other layers read its cache. The other layers return their input. They give their caches tokens
of zeros, so that every cache of the model has the same length.

Not every architecture can do without layers. One that cannot raises, or fails its self-test, and is tested whole.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from scorepool.engine.model import kv_cache

_NUM_FIRST = 2
_PLACES = {"layer_id", "layer_idx", "layer_index", "layer_number"}  # attributes in which equal layers differ


@contextmanager
def skip_equal_layers(model: Any) -> Iterator[int]:
    """Skip all but a few layers of each kind, and give the number of those skipped."""
    skipped = _equal_layers(model)
    kinds = [type(layer) for layer in skipped]
    try:
        for layer, kind in zip(skipped, kinds, strict=True):
            layer.__class__ = type(kind.__name__, (kind,), {"__call__": _pass_through})
        yield len(skipped)
    finally:
        for layer, kind in zip(skipped, kinds, strict=True):
            layer.__class__ = kind


def _equal_layers(model: Any) -> list[Module]:
    """List the layers that can be skipped."""
    layers = list(getattr(model, "layers", []))
    caches = kv_cache.new(model)
    kinds: dict[object, list[Module]] = defaultdict(list)
    for place, layer in enumerate(layers):
        if isinstance(layer, Module):
            cache = kv_cache.kind_of(caches[place]) if len(caches) == len(layers) else None
            kinds[_kind_of(layer), cache].append(layer)
    return [layer for equal in kinds.values() for layer in equal[_NUM_FIRST:-1]]


def _kind_of(value: object) -> object:
    """Return what two layers have in common if only their weights differ."""
    if isinstance(value, Module):
        attributes = {**vars(value), **value}
        return type(value), tuple(
            (name, _private(part) if name.startswith("_") else _kind_of(part))
            for name, part in sorted(attributes.items())
            if name not in _PLACES
        )
    if isinstance(value, mx.array):
        return value.shape, value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_kind_of, value))
    if isinstance(value, dict):
        return tuple((name, _kind_of(part)) for name, part in sorted(value.items()))
    return value if isinstance(value, str | int | float | None) else type(value)


def _private(value: object) -> object:
    """Return what a private attribute is: arrays such as rotary periods are no weights, so their values count."""
    return value.tolist().__repr__() if isinstance(value, mx.array) else _kind_of(value)


def _pass_through(self: Module, *args: Any, **kwargs: Any) -> mx.array:
    """Return the hidden states [rows, length, width] that the layer is given."""
    hidden, *others = (*args, *kwargs.values())
    for value in others:
        kv_cache.append_zeros(value, hidden)
    result: mx.array = hidden
    return result
