"""A batch that runs one row a forward pass, in tiles of one size: the exact mode."""

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
)
from scorepool.engine.scheduling.slice import Slice
from scorepool.engine.sequence import Sequence

TILE = 64  # tokens in every forward pass


class BatchInvariant:
    """A batch that runs one row a forward pass, cut into tiles at the multiples of TILE and padded to a whole one.

    A kernel's rounding depends on the shapes that it is given. Here they depend on a token's position alone: which tile
    it is in, and how many tiles came before. A tile that is not full yet runs on a copy of the cache, and runs again
    from its beginning when more of its tokens are known; so a generated token costs a tile. The last tile ends where
    the context does: what lies beyond has no positions, or other ones.
    """

    def __init__(
        self,
        model: Any,
        backbone_and_head: BackboneAndHead,
        can_share: bool = True,
        context_length: int = sys.maxsize,
    ) -> None:
        """Start without sequences."""
        self.can_share = can_share and kv_cache.can_be_shared(kv_cache.new(model))
        self._model = model
        self._backbone = backbone_and_head
        self.on_prompt: OnPrompt | None = None
        self.can_speculate = True
        self._context_length = context_length
        self._caches: dict[Sequence, Cache] = {}  # of the full tiles

    def prefill(self, slices: list[Slice]) -> mx.array:
        """Run one slice after the other; see BatchRunner."""
        return mx.concatenate([self._prefill(slice_) for slice_ in slices])

    def decode(self, slices: list[Slice], last_ids: mx.array) -> mx.array:
        """Run the last tile of one sequence after the other; see BatchRunner."""
        rows = zip(slices, last_ids, strict=True)
        return mx.concatenate([self._decode(slice_, last_id) for slice_, last_id in rows])

    def max_proposed(self, position: int) -> int:
        """Return how many proposed tokens leave the tile of a position unfilled; see BatchRunner.

        The cache keeps full tiles only, so nothing is to be dropped, whatever the architecture.
        """
        return max(0, TILE - 2 - position % TILE)

    def drop_rejected(self, num_rejected: dict[Sequence, int]) -> None:
        """Do nothing; see `max_proposed`."""

    def pause(self, sequences: list[Sequence]) -> None:
        """Do nothing: every sequence has a cache of its own."""

    def resume(self, sequences: list[Sequence]) -> None:
        """Do nothing; see `pause`."""

    def release(self, sequences: list[Sequence]) -> None:
        """Drop the caches of these sequences; see BatchRunner."""
        for sequence in sequences:
            self._caches.pop(sequence, None)

    def _prefill(self, slice_: Slice) -> mx.array:
        cache = self._caches.pop(slice_.sequence, None) or initial_cache(slice_, self._model)
        first = start = slice_.start // TILE * TILE
        tiles: list[mx.array] = []
        while slice_.num_tokens and start < slice_.end:
            end = min(start + TILE, slice_.end)
            tile, cache = self._run_tile(slice_.sequence, mx.array(slice_.sequence.token_ids[start:end]), start, cache)
            tiles.append(tile)
            start = end
        hidden = mx.concatenate(tiles)[None, slice_.start - first :] if tiles else None
        if self.on_prompt is not None and hidden is not None:
            self.on_prompt([slice_], hidden)
        if slice_.fills_prefix and slice_.completes_prefill and hidden is not None:
            last_hidden = hidden[0, slice_.num_tokens - 1 : slice_.num_tokens]
            start_computing(last_hidden, fill_prefix(slice_.fills_prefix, cache, last_hidden))
        elif slice_.keeps_cache:
            self._caches[slice_.sequence] = cache
        return select_predictors([slice_], hidden)

    def _decode(self, slice_: Slice, last_id: mx.array) -> mx.array:
        sequence, position = slice_.sequence, slice_.start
        start = position // TILE * TILE
        known = mx.array(sequence.token_ids[start:position], dtype=last_id.dtype)
        proposed = mx.array(slice_.proposed_ids, dtype=last_id.dtype)
        token_ids = mx.concatenate([known, last_id[None], proposed])
        hidden, self._caches[sequence] = self._run_tile(sequence, token_ids, start, self._caches[sequence])
        return hidden[position - start : slice_.end - start]

    def _run_tile(self, sequence: Sequence, token_ids: mx.array, start: int, cache: Cache) -> tuple[mx.array, Cache]:
        """Return hidden states [TILE or what is left of the context, width], and the cache of all full tiles."""
        missing = min(TILE, self._context_length - start) - token_ids.shape[0]
        grown = kv_cache.clone(cache)
        hidden = self._backbone.forward_hidden(mx.pad(token_ids, (0, missing))[None], grown, [sequence])[0]
        return (start_computing(hidden, []), cache) if missing else (start_computing(hidden, grown), grown)
