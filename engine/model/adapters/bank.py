"""The adapters of a loaded model: each has a slot, and every row of a forward pass selects one. See layer.py."""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from scorepool.engine.adapter import Adapter
from scorepool.engine.errors import AdapterError
from scorepool.engine.model.adapters.layer import BASE_SLOT, LowRankLayer, Selection, Term, attach, detach, term_of
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.sequence import Sequence

_TRIAL = (1, 2, 3)  # token ids
_TOLERANCE = 2e-2  # of hidden states in a batch against those alone, over the largest; 16 bits round to about 1e-2


class AdapterBank:
    """The terms of all adapters beside the layers of one model. Must be used on the MLX thread."""

    def __init__(self, model: Any, backbone: BackboneAndHead) -> None:
        """Start without adapters: no layer of the model is touched."""
        self._model = model
        self._backbone = backbone
        self._selection = Selection()
        self._layers: dict[str, LowRankLayer] = {}
        self._slots: dict[Adapter, int] = {}

    @property
    def adapters(self) -> list[Adapter]:
        """All adapters that have a slot."""
        return list(self._slots)

    @property
    def num_bytes(self) -> int:
        """The memory of all terms."""
        return sum(layer.num_bytes for layer in self._layers.values())

    def num_bytes_with(self, terms: dict[str, Term]) -> int:
        """Return the memory of all terms if an adapter with these is added."""
        num_slots = 1 + max([*self._slots.values(), self._free_slot()])
        empty = LowRankLayer()
        return sum(
            self._layers.get(path, empty).num_bytes_with(terms.get(path), num_slots)
            for path in self._layers.keys() | terms
        )

    def add(self, adapter: Adapter, terms: dict[str, Term]) -> None:
        """Give an adapter a slot, and test it. Raises AdapterError, and then nothing has changed."""
        slot = self._free_slot()
        self._slots[adapter] = slot
        modules: dict[str, Module] = dict(self._model.named_modules())
        for path, term in terms.items():
            if path not in self._layers:
                self._layers[path] = LowRankLayer()
                attach(modules[path], self._layers[path], self._selection)
            self._layers[path].put(slot, term)
        self._stack()
        try:
            self._try(slot, terms)
        except AdapterError:
            self.remove(adapter)
            raise
        except Exception as error:  # any: the architecture's own code
            self.remove(adapter)
            raise AdapterError(f"a forward pass with the adapter fails: {type(error).__name__}: {error}") from error

    def remove(self, adapter: Adapter) -> None:
        """Free an adapter's slot."""
        slot = self._slots.pop(adapter)
        modules: dict[str, Module] = {} if self._model is None else dict(self._model.named_modules())
        for path, layer in list(self._layers.items()):
            layer.put(slot, None)
            if layer.is_empty:
                if path in modules:  # not of a closed model
                    detach(modules[path])
                del self._layers[path]
        self._stack()

    def take_over(self, other: "AdapterBank") -> None:
        """Move the adapters of a closed model to this one, of the same architecture."""
        modules: dict[str, Module] = dict(self._model.named_modules())
        self._slots, self._layers = other._slots, other._layers
        for path, layer in self._layers.items():
            for slot, term in layer.terms.items():
                if term.source is not None:
                    layer.put(slot, term_of(path, term.source, modules[path]))
            attach(modules[path], layer, self._selection)
        self._stack()

    def close(self) -> None:
        """Let go of the model; the terms stay for `take_over`, and can be removed."""
        self._model = None
        del self._backbone

    def forward_hidden(
        self,
        token_ids: mx.array,
        cache: list[Any] | None = None,
        sequences: list[Sequence] | None = None,
        starts: list[int] | None = None,
    ) -> mx.array:
        """Return hidden states; each row's are computed with its sequence's adapter. See BackboneAndHead."""
        if not self._slots or sequences is None:
            return self._backbone.forward_hidden(token_ids, cache)
        slots = [BASE_SLOT if each.adapter is None else self._slots[each.adapter] for each in sequences]
        return self._forward(token_ids, cache, slots)

    def compute_logits(self, rows: mx.array) -> mx.array:
        """Return the base model's head of hidden states; no adapter changes it."""
        return self._backbone.compute_logits(rows)

    def _forward(self, token_ids: mx.array, cache: list[Any] | None, slots: list[int]) -> mx.array:
        if any(slots):
            self._selection.select(slots)
        try:
            return self._backbone.forward_hidden(token_ids, cache)
        finally:
            self._selection.clear()

    def _free_slot(self) -> int:
        used = {BASE_SLOT, *self._slots.values()}
        return next(slot for slot in range(len(used) + 1) if slot not in used)

    def _stack(self) -> None:
        num_slots = 1 + max(self._slots.values(), default=BASE_SLOT)
        mx.eval([array for layer in self._layers.values() for array in layer.stack(num_slots)])

    def _try(self, slot: int, terms: dict[str, Term]) -> None:
        """Refuse an adapter that a batch computes in another way than a row alone, or of which a layer is not used."""
        token_ids = mx.array([_TRIAL])
        for path in terms:
            self._layers[path].num_calls = 0
        alone = self._forward(token_ids, None, [slot]).astype(mx.float32)
        if unused := next((path for path in terms if not self._layers[path].num_calls), None):
            raise AdapterError(f"mlx-lm computes {unused} without calling it, so no change of it would have an effect")
        base = self._forward(token_ids, None, [BASE_SLOT]).astype(mx.float32)
        mixed = self._forward(mx.concatenate([token_ids] * 3), None, [BASE_SLOT, slot, BASE_SLOT]).astype(mx.float32)
        if not mx.isfinite(alone).all().item():
            raise AdapterError("with the adapter, the model computes NaN or infinite numbers")
        expected = mx.concatenate([base, alone, base])
        if bool((mx.abs(mixed - expected).max() > _TOLERANCE * (1 + mx.abs(expected).max())).item()):
            raise AdapterError("in a batch with rows of the base model, the architecture computes the adapter wrongly")
