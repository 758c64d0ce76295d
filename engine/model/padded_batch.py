"""A batch that runs all rows in one forward pass."""

import sys
from itertools import groupby
from typing import Any

import mlx.core as mx

from scorepool.engine.model import kv_cache, kv_rollback
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.batch import OnPrompt
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

MAX_CPU_QUERIES = 512  # tokens of one row that a CPU runs at a time: more multiply no faster


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
        # Some models compute the whole rectangle of the attention, of which a causal one uses half.
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
