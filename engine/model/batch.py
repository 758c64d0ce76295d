"""Batches: one forward pass of the model, and the KV caches that sequences continue with after it.

A prefill is right-padded: pads come after the tokens, so no causal model sees them. What generates joins the
decoding batch, whose caches are left-padded to the longest row:

    prefill     a a a a .      decoding    . a a a a | next
                b b . . .  ──►             . . . b b | next
                c c c c c                  c c c c c | next

Three ways to run sequences:

    PaddedBatch       all rows in one forward pass
    SequentialBatch   one row a forward pass, for a model whose caches cannot be batched
    BatchInvariant    one row a forward pass, in tiles of one size: a sequence's numbers are bit for bit the same,
                      whatever runs beside it, before it or after it
"""

import sys
from collections.abc import Callable
from itertools import groupby
from typing import Any, Protocol

import mlx.core as mx

from scorepool.engine.model import kv_cache, kv_rollback
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.kv_cache import Cache
from scorepool.engine.model.proposed_step import ProposedStep
from scorepool.engine.model.slice_arrays import (
    cut,
    fill_prefix,
    forward_row,
    initial_cache,
    select_predictors,
    start_computing,
    token_ids_of,
)
from scorepool.engine.scheduling.slice import Slice
from scorepool.engine.sequence import Sequence

MAX_CPU_QUERIES = 256  # tokens of one row that a CPU runs at a time
TILE = 64  # tokens in every forward pass of BatchInvariant


OnPrompt = Callable[[list[Slice], mx.array], None]  # slices, and their hidden states [rows, longest, width]


class BatchRunner(Protocol):
    """A way to run forward passes. No method waits for the device: results are being computed, or lazy."""

    can_share: bool  # sequences can continue from a computed prefix
    can_speculate: bool  # `decode` takes proposed tokens, and `drop_rejected` those that were rejected
    on_prompt: OnPrompt | None  # is given the hidden states of prompts that generate

    def prefill(self, slices: list[Slice]) -> mx.array:
        """Return hidden states [n, width] of the slices' predictors, in order. Keep the caches for later steps."""

    def decode(self, slices: list[Slice], last_ids: mx.array) -> mx.array:
        """Return hidden states [n, width] of the last tokens, each followed by those of its slice's proposed tokens.

        `slices` are those of all decoding sequences, last_ids [rows] their last tokens.
        """

    def max_proposed(self, position: int) -> int:
        """Return how many proposed tokens `decode` takes after the token at `position`."""

    def drop_rejected(self, num_rejected: dict[Sequence, int]) -> None:
        """Drop the rejected ones of the proposed tokens that the last `decode` was given, before the next one."""

    def pause(self, sequences: list[Sequence]) -> None:
        """Take decoding sequences out of the next steps, and keep their caches."""

    def resume(self, sequences: list[Sequence]) -> None:
        """Let paused sequences decode again, after those that decode."""

    def release(self, sequences: list[Sequence]) -> None:
        """Drop the caches of these sequences. One without a cache is ignored."""


class PaddedBatch:
    """A batch that runs all rows in one forward pass.

    Without `pads_prompts`, prompts that generate run with others of the same length only: some recurrent architectures
    of mlx-lm take padding into their state.
    """

    def __init__(
        self, model: Any, backbone_and_head: BackboneAndHead, can_share: bool = True, pads_prompts: bool = True
    ) -> None:
        """Start without sequences."""
        self._pads_prompts = pads_prompts
        self.can_share = can_share and kv_cache.can_be_shared(kv_cache.new(model))
        self.on_prompt: OnPrompt | None = None
        self.can_speculate = kv_rollback.can_drop_step(kv_cache.new(model))
        self._model = model
        self._backbone = backbone_and_head
        # A CPU computes the whole rectangle of the attention, of which a causal model uses half: it runs fewer queries.
        self._max_queries = MAX_CPU_QUERIES if mx.default_device() == mx.cpu else sys.maxsize
        self._chunked: dict[Sequence, Cache] = {}  # prefills that continue with the next chunk
        self._paused: dict[Sequence, Cache] = {}
        self._decoding: list[Sequence] = []  # in the order of the cache's rows
        self._cache: Cache = []
        self._proposed: ProposedStep | None = None  # while its tokens are not verified

    def prefill(self, slices: list[Slice]) -> mx.array:
        """Run right-padded slices; see BatchRunner."""
        longest = slices[0]
        if longest.runs_alone or longest.num_tokens > self._max_queries:
            return mx.concatenate([self._prefill_alone(slice_) for slice_ in slices])
        if longest.keeps_cache:
            equal = groupby(slices, lambda slice_: 0 if self._pads_prompts else slice_.num_tokens)
            return mx.concatenate([self._prefill_generating(list(group)) for _, group in equal])
        prefixes = [slice_.cached_prefix.cache for slice_ in slices if slice_.cached_prefix and longest.num_tokens]
        hidden = self._forward(slices, kv_cache.as_shared(prefixes) if prefixes else None)
        return start_computing(select_predictors(slices, hidden), [])

    def decode(self, slices: list[Slice], last_ids: mx.array) -> mx.array:
        """Run the next token of every row; see BatchRunner."""
        if [slice_.sequence for slice_ in slices] != self._decoding:
            raise RuntimeError("the scheduler's decoding sequences are not those that have caches")
        kv_cache.set_padding(self._cache, {slice_.start - slice_.sequence.num_left_out for slice_ in slices})
        # The whole cache is computed together with the hidden states.
        if not any(slice_.proposed_ids for slice_ in slices):
            return self._backbone.forward_hidden(last_ids[:, None], self._cache, self._decoding).squeeze(1)
        self._proposed = step = ProposedStep(slices, last_ids, self._cache)
        return select_predictors(slices, self._backbone.forward_hidden(step.token_ids, self._cache, self._decoding))

    def max_proposed(self, position: int) -> int:
        """Return how many proposed tokens are taken: any number if the caches can drop them; see BatchRunner."""
        return sys.maxsize if self.can_speculate else 0

    def drop_rejected(self, num_rejected: dict[Sequence, int]) -> None:
        """Drop rejected tokens, and the padding of rows that proposed fewer; see BatchRunner."""
        step, self._proposed = self._proposed, None
        if step is None:
            return
        dropped = {one: step.num_dropped(one, num_rejected.get(one, 0)) for one in self._decoding}
        if any(dropped.values()):
            going_on = {sequence: count for sequence, count in dropped.items() if sequence in num_rejected}
            step.recompute_states(self._backbone, self._cache, self._decoding, going_on, self._pads_prompts)
            kv_rollback.drop_last(self._cache, list(dropped.values()))

    def release(self, sequences: list[Sequence]) -> None:
        """Drop the caches of these sequences; see BatchRunner."""
        for sequence in sequences:
            self._chunked.pop(sequence, None)
            self._paused.pop(sequence, None)
        self._drop_rows(sequences)

    def pause(self, sequences: list[Sequence]) -> None:
        """Move rows out of the batch's cache; see BatchRunner."""
        step = self._proposed  # nothing was sampled, so no proposed token of it was verified
        dropped = {one: step.num_dropped(one, step.num_proposed(one)) if step else 0 for one in sequences}
        if step is not None:
            step.recompute_states(self._backbone, self._cache, self._decoding, dropped, self._pads_prompts)
        for sequence, count in dropped.items():
            self._paused[sequence] = cache = kv_cache.take_row(self._cache, self._decoding.index(sequence))
            if count:
                kv_rollback.drop_last_of_row(cache, count)
        self._drop_rows(sequences)

    def resume(self, sequences: list[Sequence]) -> None:
        """Move rows back into the batch's cache; see BatchRunner."""
        self._join(sequences, kv_cache.merge([self._paused.pop(sequence) for sequence in sequences]))

    def _drop_rows(self, sequences: list[Sequence]) -> None:
        gone = set(sequences)
        kept = [row for row, sequence in enumerate(self._decoding) if sequence not in gone]
        if len(kept) == len(self._decoding):
            return
        self._decoding = [self._decoding[row] for row in kept]
        if kept:
            kv_cache.keep_rows(self._cache, kept)
        else:
            self._cache = []

    def _prefill_alone(self, slice_: Slice) -> mx.array:
        """Run one row in a cache of its own: a chunk of a long prompt, a prefix, or a row of many tokens."""
        cache = self._chunked.pop(slice_.sequence, None) or initial_cache(slice_, self._model)
        hidden_of_predictors: list[mx.array] = []
        for piece in cut(slice_, self._max_queries):
            mx.eval(hidden_of_predictors[-1:])  # otherwise several pieces take their memory at once
            hidden = forward_row(self._backbone, piece, cache)
            if self.on_prompt is not None and hidden is not None:
                self.on_prompt([piece], hidden)
            hidden_of_predictors.append(start_computing(select_predictors([piece], hidden), cache))
        if not slice_.completes_prefill:
            self._chunked[slice_.sequence] = cache
        elif slice_.fills_prefix:
            cache = fill_prefix(slice_.fills_prefix, cache, hidden[0, -1:])
        elif slice_.keeps_cache:
            self._join([slice_.sequence], cache if slice_.sequence.kept is not None else kv_cache.merge([cache]))
            cache = self._cache
        return start_computing(mx.concatenate(hidden_of_predictors), cache)

    def _prefill_generating(self, slices: list[Slice]) -> mx.array:
        """Run whole prompts whose sequences join the decoding batch."""
        prefixes = [slice_.cached_prefix for slice_ in slices]
        cache = kv_cache.merge([prefix.cache if prefix else kv_cache.new(self._model) for prefix in prefixes])
        lengths = [slice_.num_tokens for slice_ in slices]
        is_padded = len(set(lengths)) > 1
        if is_padded:
            kv_cache.begin_right_padding(cache, lengths)
        hidden = self._forward(slices, cache)
        if self.on_prompt is not None and hidden is not None:
            self.on_prompt(slices, hidden)
        if is_padded:
            kv_cache.end_right_padding(cache)
        self._join([slice_.sequence for slice_ in slices], cache)
        return start_computing(select_predictors(slices, hidden), self._cache)

    def _join(self, sequences: list[Sequence], cache: Cache) -> None:
        if self._cache:
            kv_cache.extend(self._cache, cache)
        else:
            self._cache = cache
        self._decoding += sequences

    def _forward(self, slices: list[Slice], cache: Cache | None) -> mx.array | None:
        """Return hidden states [rows, longest, width]; None if all slices are empty."""
        longest = max(slice_.num_tokens for slice_ in slices)
        if not longest:
            return None
        rows = [token_ids_of(slice_) + [0] * (longest - slice_.num_tokens) for slice_ in slices]
        sequences, starts = [slice_.sequence for slice_ in slices], [slice_.start for slice_ in slices]
        return self._backbone.forward_hidden(mx.array(rows), cache, sequences, starts)


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
