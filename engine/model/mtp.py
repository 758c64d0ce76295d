"""A checkpoint's own head for multi-token prediction (MTP), which proposes the tokens that the model then verifies.

    position          p                  p + 1               p + 2
    hidden state      the model's        the model's         the head's own of p + 1
    token after it    sampled            sampled, the last   proposed
    the head says     sampled since      first proposed      second proposed

The head keeps keys and values of its own, from hidden states of the model only: those of what it has proposed are
dropped at once. A row begins with its prompt, or what follows a prefix that was computed before, at most MAX_MISSING
tokens of it.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx

from scorepool.engine.errors import LoadError
from scorepool.engine.model import garbage, kv_cache, kv_rollback
from scorepool.engine.model.draft import draw_proposed
from scorepool.engine.model.kv_cache import Cache
from scorepool.engine.model.mtp_layouts import Layout
from scorepool.engine.sampling.query import LogprobQuery
from scorepool.engine.scheduling.proposals import Proposal
from scorepool.engine.scheduling.slice import Slice
from scorepool.engine.sequence import Sequence

MAX_MISSING = 512  # hidden states that a row may lack; with more it begins anew with the last of them
MAX_TOGETHER = 32  # that a row may lack and still run with the others


class Head:
    """The layer, the norms and the projection of a head: hidden states in, hidden states and logits out."""

    def __init__(self, model: Any, layout: Layout) -> None:
        """Take over a model of one layer, as `mtp_layouts.head_class` makes them. Raises LoadError."""
        if not kv_rollback.can_drop_last(kv_cache.new(model)):
            raise LoadError("the head for multi-token prediction has a layer from which tokens cannot be dropped")
        self._model = model
        self._layout = layout
        self._embedding = model.embedding = model.model.embed_tokens
        self._norm = model.model.norm
        self._given: mx.array | None = None  # in place of embeddings
        self._before_norm = mx.array(0.0)
        model.model.embed_tokens = self._embed
        model.model.norm = self._take_and_norm

    def new_cache(self) -> Cache:
        """Make the empty cache of one row."""
        return kv_cache.new(self._model)

    def forward(self, token_ids: mx.array, hidden: mx.array, cache: Cache) -> tuple[mx.array, mx.array]:
        """Return two hidden states [rows, length, width]: what the next token is given, and what the logits need.

        token_ids [rows, length] are the tokens after those of the hidden states [rows, length, width].
        """
        pair = [self._model.embedding_norm(self._embedding(token_ids)), self._model.hidden_norm(hidden)]
        if self._layout.hidden_first:
            pair.reverse()
        self._given = self._model.projection(mx.concatenate(pair, axis=-1))
        normed = self._model.model(token_ids, cache)
        self._given = None
        return (normed if self._layout.passes_normed else self._before_norm), normed

    def compute_logits(self, rows: mx.array) -> mx.array:
        """Return the logits [n, vocab] of hidden states [n, width]."""
        has_head = "lm_head" in self._model
        logits: mx.array = self._model.lm_head(rows) if has_head else self._embedding.as_linear(rows)
        return logits

    def _embed(self, token_ids: mx.array) -> mx.array:
        """Return what the layer is given; the embeddings alone if its cache is measured."""
        embedded: mx.array = self._embedding(token_ids)
        return embedded if self._given is None else self._given

    def _take_and_norm(self, hidden: mx.array) -> mx.array:
        self._before_norm = hidden
        normed: mx.array = self._norm(hidden)
        return normed


@dataclass(slots=True)
class _Row:
    """What is known of one sequence: hidden states of the model that are not in the head's cache."""

    first: int  # position of the first of them
    end: int  # position after the last
    states: list[mx.array] = field(default_factory=list)  # [n, width]

    def append(self, states: mx.array) -> None:
        """Append the states of the next tokens."""
        self.states.append(states)
        self.end += states.shape[0]

    def keep_before(self, position: int) -> None:
        """Drop the states from a position on."""
        while self.states and self.end > position:
            last = self.states.pop()
            start = self.end - last.shape[0]
            self.end = max(start, min(self.end, position))
            if self.end > start:
                self.states.append(last[: self.end - start])

    def take(self, num_kept: int = 0) -> mx.array:
        """Return the states [n, width], which go into the cache now, or are dropped. Keep the last `num_kept`."""
        taken = mx.concatenate(self.states)
        self.states = [mx.contiguous(taken[-num_kept:])] if num_kept else []  # else it holds all of them
        self.first = self.end - num_kept
        return taken[: taken.shape[0] - num_kept]


class PredictionHead:
    """The head's caches of decoding sequences; see Draft. Must be used on the MLX thread."""

    def __init__(self, head: Head) -> None:
        """Start without sequences."""
        self.has_prefilled = False
        self._head = head
        self._known: WeakKeyDictionary[Sequence, _Row] = WeakKeyDictionary()
        self._cache: Cache = []
        self._rows: list[Sequence] = []  # in the order of the cache's rows

    def max_proposed(self, position: int) -> int:
        """Return how many tokens can be proposed after the one at `position`: any number."""
        return sys.maxsize

    def observe(self, queries: list[LogprobQuery], rows: mx.array) -> None:
        """Keep the hidden states [n, width] from which tokens of rows that may propose are sampled now.

        They are copied if there are others: what a step computes beside them must not stay in memory with them.
        """
        wanted: list[tuple[Sequence, range]] = []
        index: list[int] = []
        stop = 0
        for query in queries:
            stop += len(query.positions)
            if (positions := query.sampled_positions) and query.sequence.proposes_by("mtp") == "mtp":
                wanted.append((query.sequence, positions))
                index += range(stop - len(positions), stop)
        if not wanted:
            return
        if len(index) < stop:
            rows = rows[mx.array(index, dtype=mx.int32)]
            mx.async_eval(rows)
        start = 0
        for sequence, positions in wanted:
            self._append(sequence, positions.start - 1, rows[start : start + len(positions)])
            start += len(positions)

    def observe_prompt(self, slices: list[Slice], hidden: mx.array) -> None:
        """Keep hidden states [rows, longest, width] of prompts, right-padded, whose rows may propose."""
        for number, slice_ in enumerate(slices):
            count = min(slice_.num_tokens, MAX_MISSING)
            if count and slice_.sequence.proposes_by("mtp") == "mtp":
                last = slice_.num_tokens
                states = mx.contiguous(hidden[number, last - count : last])  # else it holds those of all rows
                mx.async_eval(states)
                self._append(slice_.sequence, slice_.end - count, states)

    def propose(self, sequences: list[Sequence], num_tokens: int) -> list[Proposal]:
        """Propose as many tokens for each sequence, none for one whose last hidden state is not known. Waits for them.

        The caches of all other sequences are dropped; their hidden states are not.
        """
        self.has_prefilled = False
        asked = [one for one in sequences if self._prepare(one)]
        self._drop_rows([row for row in self._rows if row not in set(asked)])
        for sequence in asked:
            self._join(sequence)
        made = self._generate(num_tokens) if self._rows and num_tokens > 0 else {}
        return [made.get(sequence, Proposal()) for sequence in sequences]

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Drop what is kept of these sequences. One that is not known is ignored."""
        gone = [sequence for sequence in sequences if self._known.pop(sequence, None) is not None]
        self._drop_rows(gone)

    def close(self) -> None:
        """Drop the weights and all caches, for good."""
        self._known.clear()
        self._rows, self._cache = [], []
        del self._head
        garbage.collect()

    def _prepare(self, sequence: Sequence) -> bool:
        """Drop the states of rejected tokens, and of those long ago. Return True if there is one to propose from."""
        row, end = self._known.get(sequence), len(sequence.token_ids) - 1
        if row is None:
            return False
        row.keep_before(end)
        if row.end != end or not row.states:
            return False
        if end - row.first > MAX_MISSING:
            self._keep_last(sequence, row)
        return True

    def _append(self, sequence: Sequence, start: int, states: mx.array) -> None:
        """Append the states of a row's tokens from position `start` on, in place of those that were there."""
        row = self._known.get(sequence)
        if row is None or row.end < start or row.first > start:
            self._drop_rows([sequence])
            row = self._known[sequence] = _Row(start, start)
        row.keep_before(start)
        row.append(states)
        if row.end - row.first > 2 * MAX_MISSING:
            self._keep_last(sequence, row)

    def _keep_last(self, sequence: Sequence, row: _Row) -> None:
        """Let a row begin anew with its last hidden states."""
        self._drop_rows([sequence])
        row.take(num_kept=MAX_MISSING)
        mx.async_eval(row.states)

    def _join(self, sequence: Sequence) -> None:
        """Let a row run with the others; many hidden states first run in a cache of its own, all but the last."""
        row = self._known[sequence]
        is_long = row.end - row.first > MAX_TOGETHER
        if sequence in self._rows and not is_long:
            return
        cache = self._head.new_cache()
        if sequence in self._rows:
            cache = kv_cache.take_row(self._cache, self._rows.index(sequence))
            self._drop_rows([sequence])
        if is_long:
            start, states = row.first, row.take(num_kept=1)
            token_ids = mx.array([sequence.token_ids[start + 1 : row.first + 1]])
            self._head.forward(token_ids, states[None], cache)
            mx.eval(kv_cache.arrays(cache))
            self.has_prefilled = True
        merged = kv_cache.merge([cache])
        if self._cache:
            kv_cache.extend(self._cache, merged)
        else:
            self._cache = merged
        self._rows.append(sequence)

    def _drop_rows(self, sequences: list[Sequence]) -> None:
        gone = set(sequences)
        kept = [number for number, row in enumerate(self._rows) if row not in gone]
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[number] for number in kept]
        if kept:
            kv_cache.keep_rows(self._cache, kept)
        else:
            self._cache = []

    def _generate(self, num_tokens: int) -> dict[Sequence, Proposal]:
        """Propose tokens for each row of the cache, and drop from it what they have added."""
        passed, normed = self._run_known()
        token_ids: list[mx.array] = []
        logprobs: list[mx.array] = []
        for number in range(num_tokens):
            if number:
                kv_cache.set_padding(self._cache, set())
                passed, normed = self._head.forward(token_ids[-1][:, None], passed, self._cache)
            logits = self._head.compute_logits(normed.squeeze(1)).astype(mx.float32)
            drawn, values = draw_proposed(logits, self._rows, number)
            token_ids.append(drawn)
            logprobs.append(values)
            mx.async_eval(drawn, values)
        if num_tokens > 1:
            kv_rollback.drop_last(self._cache, [num_tokens - 1] * len(self._rows))
        found, all_logprobs = mx.stack(token_ids, axis=1), mx.stack(logprobs, axis=1)
        mx.eval(found, all_logprobs, kv_cache.arrays(self._cache))
        all_ids: list[list[int]] = found.tolist()  # type: ignore[assignment]
        all_values: list[list[float]] = all_logprobs.tolist()  # type: ignore[assignment]
        rows = zip(self._rows, all_ids, all_values, strict=True)
        return {row: Proposal(tuple(ids), tuple(values)) for row, ids, values in rows}

    def _run_known(self) -> tuple[mx.array, mx.array]:
        """Run the hidden states that are not in the cache. Return those of the last tokens [rows, 1, width]."""
        starts = [self._known[row].first for row in self._rows]
        states = [self._known[row].take() for row in self._rows]
        lengths = [state.shape[0] for state in states]
        longest = max(lengths)
        pads = [longest - length for length in lengths]
        hidden = mx.stack([mx.pad(state, [(0, pad), (0, 0)]) for state, pad in zip(states, pads, strict=True)])
        tokens = [
            row.token_ids[start + 1 : start + 1 + length] + [0] * pad
            for row, start, length, pad in zip(self._rows, starts, lengths, pads, strict=True)
        ]
        if any(pads):
            kv_cache.begin_right_padding(self._cache, lengths)
        kv_cache.set_padding(self._cache, set())
        passed, normed = self._head.forward(mx.array(tokens), hidden, self._cache)
        if any(pads):
            kv_cache.end_right_padding(self._cache)
        last = mx.arange(len(lengths)), mx.array(lengths) - 1
        return passed[last][:, None], normed[last][:, None]
