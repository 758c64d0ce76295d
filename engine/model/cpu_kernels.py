"""Compute what MLX computes slowly on CPUs without its SIMD: exponentials, and rotary positions.

MLX 0.32 has SIMD on ARM only. Elsewhere its exponential takes 15 to 20 ns an element, one at a time, so the softmax of
attention and the SiLU cost as much as matrix products, and each rotary module computes its angles anew in every layer.
NumPy's exponential takes 0.5 ns, and works on the memory of MLX's arrays:

    attention   of prompts, a block of queries at a time; keys that no query of a block sees are left out
    swiglu      of prompts
    rotary      tables of the cosines and sines that the module itself has computed

The first two wait for the device, so steps that only decode keep MLX's own, and run on all of the BLAS's threads, of
which MLX uses one for all but products. cpu_logprobs.py normalizes logits. Values are within 1e-6 of MLX's, and depend
on the shapes alone, as MLX's do: exact mode is still exact.
"""

import platform
from collections.abc import Hashable
from types import FunctionType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models import activations, base
from mlx_lm.models.rope_utils import Llama3RoPE
from numpy.typing import NDArray

from scorepool.engine.model.cpu_threads import for_each
from scorepool.engine.model.kv_cache import StepOffsets
from scorepool.engine.model.patch_globals import replace_globals
from scorepool.engine.model.rope import ConfiguredRoPE

MIN_ELEMENTS = 2**14  # of an array that is worth waiting for
_BLOCK = 64  # queries that are computed together, with the keys that any of them sees
_CHUNK = 2**17  # elements that stay in the processor's cache
_MIN_DIVIDED = 2**20  # weights whose rows are divided: each part asks for the GIL, and may wait for another thread
_FIRST_POSITIONS = 512  # of a rotary table, which becomes longer as rows do
_MAX_TABLE_FLOATS = 2**23  # of cosines, and as many of sines
_LATER = np.triu(np.ones((_BLOCK, _BLOCK), np.bool_), 1)  # [query, key]: the key comes after the query
_HAS_SIMD = platform.machine().lower() in ("arm64", "aarch64")

Floats = NDArray[np.float32]
_Block = tuple[tuple[slice, slice], slice]  # rows and groups, and their queries


def are_used() -> bool:
    """True if models compute in these ways: on a CPU for which MLX has no SIMD."""
    return not _HAS_SIMD and mx.default_device() == mx.cpu


def install(model: Any, max_positions: int) -> None:
    """Make a model compute in these ways, where they are used. No row has more positions."""
    if not are_used():
        return
    replacements = {"swiglu": swiglu, "scaled_dot_product_attention": attention}
    originals = {"swiglu": activations.swiglu, "scaled_dot_product_attention": base.scaled_dot_product_attention}
    for kind in {type(module) for module in model.modules()}:
        call = kind.__call__
        if not isinstance(call, FunctionType):
            continue
        names = [name for name in call.__code__.co_names if call.__globals__.get(name) is originals.get(name, model)]
        if names:
            replace_globals(model, kind, **{name: replacements[name] for name in names})
    _install_tables(model, max_positions)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Return silu(gate) * x."""
    if not _is_worthwhile(gate) or x.dtype != mx.float32 or x.shape != gate.shape:
        product: mx.array = activations.swiglu(gate, x)
        return product
    negated = mx.contiguous(-gate)  # whose elements lie in order, so that a flat view is one on the same memory
    mx.eval(negated, gate, x)
    result, gates, factors = (_view(array).reshape(-1) for array in (negated, gate, x))

    def multiply(part: slice) -> None:
        with np.errstate(over="ignore"):  # exp(-gate) is infinite for a gate whose SiLU is 0
            np.exp(result[part], out=result[part])
        result[part] += 1
        np.divide(gates[part], result[part], out=result[part])
        result[part] *= factors[part]

    for_each(multiply, [slice(start, start + _CHUNK) for start in range(0, result.size, _CHUNK)])
    return negated


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Return softmax(scale * queries @ keys.T) @ values, [rows, heads, length, width]; fewer heads of keys are shared.

    mask    None, "causal", or an array that broadcasts to [rows, heads, length, keys]: True or added
    """
    rows, heads, length, width = queries.shape
    groups, num_keys = keys.shape[1], keys.shape[2]
    is_float32 = queries.dtype == keys.dtype == values.dtype == mx.float32
    is_worthwhile = length > 1 and rows * heads * length * num_keys >= MIN_ELEMENTS and is_float32
    if not is_worthwhile or sinks is not None or hasattr(cache, "bits"):
        return base.scaled_dot_product_attention(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)
    mx.eval(queries, keys, values)
    all_queries, all_keys, all_values = _view(queries), _view(keys), _view(values)
    all_queries = all_queries.reshape(rows, groups, heads // groups, length, width)
    is_causal = isinstance(mask, str)
    given = None if mask is None or is_causal else _per_group(_view(mask), groups, heads // groups)
    attended = np.empty((*all_queries.shape[:-1], all_values.shape[-1]), np.float32)

    def attend(block: _Block) -> None:
        """Write what some queries of some rows and groups attend to. Their weights stay in the processor's cache."""
        of, asked = block
        part = None if given is None else _part(given, of, asked)
        seen = slice(num_keys - length + asked.stop) if is_causal else _seen(part)
        scaled = all_queries[*of, :, asked] * np.float32(scale)
        joined = scaled.reshape(*scaled.shape[:2], -1, width)  # the heads of a group have the same keys
        weights = np.matmul(joined, all_keys[*of, seen].swapaxes(-1, -2))
        of_head = weights.reshape(*scaled.shape[:-1], -1)
        if is_causal:
            size = asked.stop - asked.start
            np.copyto(of_head[..., -size:], -np.inf, where=_LATER[:size, :size])
        elif part is not None:
            _apply_mask(of_head, part if part.shape[-1] == 1 else part[..., seen])
        weights -= weights.max(axis=-1, keepdims=True)
        np.exp(weights, out=weights)
        sums = weights.sum(axis=-1, keepdims=True)
        found = np.matmul(weights, all_values[*of, seen])
        found /= sums  # there are fewer quotients than weights
        attended[*of, :, asked] = found.reshape(*scaled.shape[:-1], -1)

    for_each(attend, _blocks(rows, groups, length, heads // groups * num_keys))
    return mx.array(attended.reshape(rows, heads, length, -1))


def _blocks(rows: int, groups: int, length: int, weights_per_query: int) -> list[_Block]:
    """Divide the queries of all rows and groups, so that the weights of a block stay in the processor's cache.

    Those that may see the most keys come first. Of few weights all rows and groups are in a block.
    """
    if rows * groups * length * weights_per_query < _MIN_DIVIDED:
        return [
            ((slice(rows), slice(groups)), slice(start, min(start + _BLOCK, length)))
            for start in range(0, length, _BLOCK)
        ]
    per_group = min(_BLOCK, length) * weights_per_query
    num_groups = max(1, min(groups, _CHUNK // per_group))
    num_rows = max(1, _CHUNK // (per_group * groups))
    return [
        ((slice(row, row + num_rows), slice(group, group + num_groups)), slice(start, min(start + _BLOCK, length)))
        for start in reversed(range(0, length, _BLOCK))
        for row in range(0, rows, num_rows)
        for group in range(0, groups, num_groups)
    ]


def _per_group(mask: Any, groups: int, heads_of_group: int) -> Any:
    """Return a mask that broadcasts to [rows, groups, heads of a group, length, keys]."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    rows, heads, *rest = mask.shape
    return mask.reshape(rows, *((groups, heads_of_group) if heads > 1 else (1, 1)), *rest)


def _part(mask: Any, of: tuple[slice, slice], asked: slice) -> Any:
    """Return the part of a mask [rows, groups, heads of a group, length, keys], of which each but the keys may be 1."""
    rows, groups, _, length, _ = mask.shape
    every = slice(None)
    of_rows, of_groups = of
    return mask[of_rows if rows > 1 else every, of_groups if groups > 1 else every, :, asked if length > 1 else every]


def _seen(mask: Any) -> slice:
    """Return the keys from the first to the last one that any query of a mask sees; all without a mask of booleans."""
    if mask is None or mask.dtype != np.bool_ or mask.shape[-1] == 1:
        return slice(None)
    visible = np.flatnonzero(mask.any(axis=tuple(range(mask.ndim - 1))))
    return slice(visible[0], visible[-1] + 1) if visible.size else slice(None)


def _apply_mask(weights: Floats, mask: Any) -> None:
    """Exclude keys from weights [rows, groups, heads of a group, queries, keys]."""
    if mask.dtype == np.bool_:
        np.copyto(weights, np.finfo(np.float32).min, where=~mask)
    else:
        weights += mask


def _is_worthwhile(array: mx.array) -> bool:
    return array.size >= MIN_ELEMENTS and array.ndim > 2 and array.shape[1] > 1 and array.dtype == mx.float32


def _view(array: mx.array) -> Any:
    """Return an array of NumPy on the memory of an array, which is computed now if it was not."""
    return np.array(array, copy=False)


class RotaryTable:
    """What a rotary module multiplies the dimensions of a head with, and their partners, by position."""

    def __init__(self, module: Any, max_positions: int) -> None:
        self._rotate = type(module).__call__
        self._module = module
        self._max_positions = min(max_positions, _MAX_TABLE_FLOATS // module.dims)
        self._reaches_all = self._max_positions == max_positions
        nothing = mx.zeros((0, module.dims))
        self._table = nothing, nothing  # cosines and sines, replaced together: several threads read them

    def rotate(self, x: mx.array, offset: int | mx.array) -> mx.array | None:
        """Rotate x [rows, heads, length, dims], or return None if the table does not hold all positions."""
        found = self._at(offset, x.shape[2])
        if found is None:
            return None
        cos, sin = found
        half = x.shape[3] // 2
        partners = mx.concatenate([x[..., half:], x[..., :half]], axis=-1)
        return x * cos + partners * sin

    def _at(self, offset: int | mx.array, length: int) -> tuple[mx.array, mx.array] | None:
        """Return cosines and sines that broadcast to [rows, heads, length, dims]."""
        if isinstance(offset, int):
            if offset < 0 or offset + length > self._max_positions:
                return None
            cos, sin = self._grown(offset + length)
            return cos[offset : offset + length], sin[offset : offset + length]
        if not self._reaches_all or offset.ndim != 1:
            return None
        cos, sin = self._grown(self._max_positions)  # the device knows the positions, not the host
        last = self._max_positions - 1  # padding may be beyond, and what lies there must not be read
        if length == 1:
            derived = offset.derived if isinstance(offset, StepOffsets) else {}
            if self not in derived:
                positions = mx.minimum(offset, last)[:, None, None]
                derived[self] = cos[positions], sin[positions]
            found: tuple[mx.array, mx.array] = derived[self]
            return found
        positions = mx.minimum(offset[:, None] + mx.arange(length), last)
        return cos[positions[:, None]], sin[positions[:, None]]

    def _grown(self, num_positions: int) -> tuple[mx.array, mx.array]:
        """Return cosines and sines of so many positions, or of more.

        The module rotates a vector of ones and zeros at each position, so that values are its own.
        """
        if num_positions <= self._table[0].shape[0]:
            return self._table
        size = min(max(_FIRST_POSITIONS, 2 * num_positions), self._max_positions)
        half = self._module.dims // 2
        ones = (mx.arange(2 * half) < half).astype(mx.float32)
        rotated = self._rotate(self._module, mx.broadcast_to(ones, (1, 1, size, 2 * half)), offset=0)[0, 0]
        cos, sin = rotated[:, :half], rotated[:, half:]
        table = mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)
        mx.eval(table)  # another thread can read them only if they are computed
        if size > self._table[0].shape[0]:  # no other thread was faster
            self._table = table
        return table


def _install_tables(model: Any, max_positions: int) -> None:
    """Let rotary modules of all layers that rotate alike share a table."""
    tables: dict[Hashable, RotaryTable] = {}
    kinds: dict[type, type] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in (RoPE, Llama3RoPE, ConfiguredRoPE) or module.traditional:
            continue
        table = tables.setdefault(_rotation_of(module), RotaryTable(module, max_positions))
        kinds.setdefault(kind, _with_table(kind))
        module.__class__ = kinds[kind]
        module._table = table


def _rotation_of(module: Any) -> Hashable:
    """Return what decides how a rotary module rotates."""
    freqs = getattr(module, "_freqs", None)
    names = ("dims", "base", "scale", "attention_factor")
    return type(module), None if freqs is None else tuple(freqs.tolist()), *(getattr(module, n, None) for n in names)


def _with_table(kind: type[Module]) -> type[Module]:
    """Return a subclass of a kind of rotary module that looks values up."""

    class TabledRotary(kind):  # type: ignore[misc, valid-type]
        def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
            if x.ndim == 4 and x.shape[3] == self.dims and x.dtype == mx.float32:
                rotated: mx.array | None = self._table.rotate(x, offset)
                if rotated is not None:
                    return rotated
            computed: mx.array = kind.__call__(self, x, offset=offset)
            return computed

    return TabledRotary
