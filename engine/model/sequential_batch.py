"""A batch that runs one row a forward pass, for a model whose caches cannot be batched."""

import sys
from typing import Any

import mlx.core as mx

from scorepool.engine.model import kv_cache
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.batch import OnPrompt
from scorepool.engine.model.kv_cache import Cache
from scorepool.engine.model.slice_arrays import (
    fill_prefix,
    initial_cache,
    select_predictors,
    start_computing,
    token_ids_of,
)
from scorepool.engine.scheduling.slice import Slice
from scorepool.engine.sequence import Sequence


class SequentialBatch:
    """A batch that runs one row a forward pass, with the caches that mlx-lm gives a single row."""

    def __init__(self, model: Any, backbone_and_head: BackboneAndHead, can_share: bool = True) -> None:
        """Start without sequences."""
        self.can_share = can_share and kv_cache.can_be_shared(kv_cache.new(model))
        self.on_prompt: OnPrompt | None = None
        self.can_speculate = True
        self._model = model
        self._backbone = backbone_and_head
        self._caches: dict[Sequence, Cache] = {}
        self._before: dict[Sequence, tuple[Cache, mx.array]] = {}  # and the tokens since, while these are not verified

    def prefill(self, slices: list[Slice]) -> mx.array:
        """Run one slice after the other; see BatchRunner."""
        return mx.concatenate([self._prefill(slice_) for slice_ in slices])

    def max_proposed(self, position: int) -> int:
        """Return how many proposed tokens are taken: any number; see BatchRunner."""
        return sys.maxsize if self.can_speculate else 0

    def drop_rejected(self, num_rejected: dict[Sequence, int]) -> None:
        """Go back to the cache before the last tokens, and run those again that are kept; see BatchRunner."""
        before, self._before = self._before, {}
        for sequence, (cache, token_ids) in before.items():
            if num := num_rejected.get(sequence, 0):
                self._caches[sequence] = cache
                self._forward(token_ids[None, : token_ids.size - num], cache, sequence)

    def decode(self, slices: list[Slice], last_ids: mx.array) -> mx.array:
        """Run one row after the other; see BatchRunner."""
        rows = zip(slices, last_ids, strict=True)
        return mx.concatenate([self._decode(slice_, last_id[None]) for slice_, last_id in rows])

    def pause(self, sequences: list[Sequence]) -> None:
        """Drop proposed tokens, none of which was verified; see BatchRunner. Every sequence has a cache of its own."""
        pausing = {one: self._before.pop(one) for one in sequences if one in self._before}
        others, self._before = self._before, pausing
        self.drop_rejected({sequence: token_ids.size - 1 for sequence, (_, token_ids) in pausing.items()})
        self._before = others

    def resume(self, sequences: list[Sequence]) -> None:
        """Do nothing; see `pause`."""

    def release(self, sequences: list[Sequence]) -> None:
        """Drop the caches of these sequences; see BatchRunner."""
        for sequence in sequences:
            self._caches.pop(sequence, None)
            self._before.pop(sequence, None)

    def _decode(self, slice_: Slice, last_id: mx.array) -> mx.array:
        sequence, token_ids = slice_.sequence, last_id
        if slice_.proposed_ids:
            token_ids = mx.concatenate([last_id, mx.array(slice_.proposed_ids, dtype=last_id.dtype)])
            self._before[sequence] = kv_cache.clone(self._caches[sequence]), token_ids
        return self._forward(token_ids[None], self._caches[sequence], sequence)[0]

    def _prefill(self, slice_: Slice) -> mx.array:
        cache = self._caches.pop(slice_.sequence, None) or initial_cache(slice_, self._model)
        token_ids = mx.array([token_ids_of(slice_)])
        hidden = self._forward(token_ids, cache, slice_.sequence, [slice_.start]) if slice_.num_tokens else None
        if self.on_prompt is not None and hidden is not None:
            self.on_prompt([slice_], hidden)
        if slice_.fills_prefix and slice_.completes_prefill and hidden is not None:
            start_computing(hidden, fill_prefix(slice_.fills_prefix, cache, hidden[0, -1:]))
        elif slice_.keeps_cache:
            self._caches[slice_.sequence] = cache
        return select_predictors([slice_], hidden)

    def _forward(
        self, token_ids: mx.array, cache: Cache, sequence: Sequence, starts: list[int] | None = None
    ) -> mx.array:
        return start_computing(self._backbone.forward_hidden(token_ids, cache, [sequence], starts), cache)
