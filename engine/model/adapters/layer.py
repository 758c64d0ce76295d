"""The low-rank terms of one layer, for all adapters, and the layer's call with them.

x         [rows, length, in], or its rows and length joined
a         [slots, rank, in] float32       shorter ranks are padded with zeros
b         [slots, rank, out] float32      scaled
gains     [slots, out] float32            DoRA: the changed weight's norm over the base's, minus 1

Slot 0 is the base model: zeros, so that its rows keep their numbers to the bit beside rows of adapters.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from scorepool.engine.errors import AdapterError
from scorepool.engine.model.adapters.weights import LowRank

BASE_SLOT = 0
_LEAST_NORM = 1e-30


@dataclass(slots=True)
class Selection:
    """The slots of the rows of the forward pass that is being built."""

    num_rows: int = 0
    used: frozenset[int] = frozenset()
    slots: mx.array | None = None  # [rows] uint32; None if all rows have one slot

    def select(self, slots: list[int]) -> None:
        """Choose one slot a row."""
        self.num_rows, self.used = len(slots), frozenset(slots)
        self.slots = mx.array(slots, dtype=mx.uint32) if len(self.used) > 1 else None

    def clear(self) -> None:
        """Choose the base model for all rows."""
        self.num_rows, self.used, self.slots = 0, frozenset(), None


@dataclass(frozen=True, slots=True)
class Term:
    """The change of a layer by one adapter, as `a`, `b` and `gains` hold it."""

    a: mx.array
    b: mx.array
    gain: mx.array | None
    source: LowRank | None = None  # of DoRA, whose term follows from the base's weight too

    @property
    def rank(self) -> int:
        """The number of rows of A."""
        return int(self.a.shape[0])


class LowRankLayer:
    """The terms of one layer, by slot."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._terms: dict[int, Term] = {}
        self._a = self._b = mx.zeros((0,))
        self._gains: mx.array | None = None

    def put(self, slot: int, term: Term | None) -> None:
        """Set or remove a term; `stack` must follow."""
        self._terms.pop(slot, None)
        if term is not None:
            self._terms[slot] = term

    @property
    def terms(self) -> dict[int, Term]:
        """The terms by slot."""
        return dict(self._terms)

    @property
    def is_empty(self) -> bool:
        """True if no adapter changes the layer."""
        return not self._terms

    @property
    def num_bytes(self) -> int:
        """The memory of all terms, with their padding."""
        return int(self._a.nbytes + self._b.nbytes + (0 if self._gains is None else self._gains.nbytes))

    def num_bytes_with(self, added: Term | None, num_slots: int) -> int:
        """Return the memory of all terms, with their padding, if one more is added."""
        terms = [*self._terms.values(), *([] if added is None else [added])]
        rank = max(term.rank for term in terms)
        width, out = int(terms[0].a.shape[1]), int(terms[0].b.shape[1])
        has_gains = any(term.gain is not None for term in terms)
        return 4 * num_slots * (rank * (width + out) + (out if has_gains else 0))

    def stack(self, num_slots: int) -> list[mx.array]:
        """Join the terms; return the arrays to evaluate."""
        if not self._terms:
            return []
        rank = max(term.rank for term in self._terms.values())
        first = next(iter(self._terms.values()))
        a = [mx.zeros((rank, first.a.shape[1]))] * num_slots
        b = [mx.zeros((rank, first.b.shape[1]))] * num_slots
        gains = [mx.zeros((first.b.shape[1],))] * num_slots
        for slot, term in self._terms.items():
            padding = [(0, rank - term.rank), (0, 0)]
            a[slot], b[slot] = mx.pad(term.a, padding), mx.pad(term.b, padding)
            gains[slot] = gains[slot] if term.gain is None else term.gain
        self._a, self._b = mx.stack(a), mx.stack(b)
        has_gains = any(term.gain is not None for term in self._terms.values())
        self._gains = mx.stack(gains) if has_gains else None
        for slot, term in self._terms.items():  # views of what was joined, so that nothing is kept twice
            gain = None if term.gain is None or self._gains is None else self._gains[slot]
            self._terms[slot] = Term(self._a[slot, : term.rank], self._b[slot, : term.rank], gain, term.source)
        views = [array for term in self._terms.values() for array in (term.a, term.b)]
        return [self._a, self._b, *([] if self._gains is None else [self._gains]), *views]

    def add(self, selection: Selection, x: mx.array, y: mx.array, bias: mx.array | None) -> mx.array:
        """Return the layer's output y with the terms of the selected slots."""
        self.num_calls += 1
        if self._terms.keys().isdisjoint(selection.used):
            return y
        base = y.astype(mx.float32)
        if selection.slots is None:
            (slot,) = selection.used
            term = self._terms[slot]
            low, gain = (x.astype(mx.float32) @ term.a.T) @ term.b, term.gain
        else:
            rows, slots = x.astype(mx.float32).reshape(selection.num_rows, -1, x.shape[-1]), selection.slots
            narrow = mx.gather_mm(rows, self._a.swapaxes(1, 2), rhs_indices=slots)
            low = mx.gather_mm(narrow, self._b, rhs_indices=slots)
            gain = None if self._gains is None else self._gains[slots][:, None]
            base = base.reshape(low.shape)
        if gain is not None:
            base = base + gain * (base if bias is None else base - bias.astype(mx.float32))
        return (base + low).reshape(y.shape).astype(y.dtype)


def attach(module: Module, layer: LowRankLayer, selection: Selection) -> None:
    """Let the module's calls add the layer's terms."""
    kind = type(module)

    class Adapted(kind):  # type: ignore[misc, valid-type]
        def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            y: mx.array = kind.__call__(self, x, *args, **kwargs)
            return layer.add(selection, x, y, self.get("bias")) if selection.used else y

    Adapted.__name__ = Adapted.__qualname__ = kind.__name__
    module.__class__ = Adapted


def detach(module: Module) -> None:
    """Give the module its own class back."""
    module.__class__ = type(module).__mro__[1]


def widths(module: Module) -> tuple[int, int] | None:
    """Return how many numbers a layer takes and gives; None if it is no linear layer."""
    if isinstance(module, QuantizedLinear):
        return int(module.scales.shape[1]) * int(module.group_size), int(module.weight.shape[0])
    if isinstance(module, Linear):
        return int(module.weight.shape[1]), int(module.weight.shape[0])
    return None


def term_of(path: str, change: LowRank, module: Any) -> Term:
    """Return a change as the layer computes it. Raises AdapterError."""
    if change.magnitude is None:
        return Term(change.a, change.b, None)
    weight = dense_weight(module)
    if change.magnitude.shape != (weight.shape[0],):
        shape = list(change.magnitude.shape)
        raise AdapterError(f"{path}: the vector of magnitudes is {shape}, expected [{weight.shape[0]}]")
    norm = mx.linalg.norm(weight + change.b.T @ change.a, axis=1)
    if bool((norm.min() < _LEAST_NORM).item()):
        raise AdapterError(f"{path}: a row of the changed weight is 0, so DoRA cannot divide by its norm")
    ratio = change.magnitude / norm
    return Term(change.a, change.b * ratio, ratio - 1, change)


def dense_weight(module: Any) -> mx.array:
    """Return a linear layer's weight [out, in] in float32."""
    if isinstance(module, QuantizedLinear):
        biases = module.get("biases")
        weight = mx.dequantize(
            module.weight, module.scales, biases, group_size=module.group_size, bits=module.bits, mode=module.mode
        )
    else:
        weight = module.weight
    return weight.astype(mx.float32)
