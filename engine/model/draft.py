"""A draft model: a smaller one with the same vocabulary, which proposes the tokens that the model then verifies.

    sequence            a b c d e          the draft's cache     a b c d e | x y
    the model keeps     a b c d e x z                            a b c d e | x      y is dropped
                                           missing                           z      runs first, then what it proposes

A step waits for the draft. So a long prompt goes through it in several steps, a part in each, and what is not read has
no proposals yet.

All rows run in one batch. A row is drawn as the model's own will be: with its temperature and filters, and with the
noise of its next tokens, so that two models that agree draw the same tokens.
"""

from collections.abc import Iterable
from typing import Any

import mlx.core as mx

from scorepool.engine.errors import LoadError
from scorepool.engine.model import garbage, kv_cache, kv_rollback
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.kv_cache import Cache
from scorepool.engine.sampling import sample, scoring
from scorepool.engine.scheduling.proposals import Proposal
from scorepool.engine.sequence import Sampling, Sequence

MAX_MISSING = 32  # tokens that a row may lack and still run with the others
MAX_CHUNK = 256  # tokens of a prompt in one forward pass
MAX_READ = 512  # tokens of prompts in one step


class DraftModel:
    """The draft model's caches of decoding sequences. Must be used on the MLX thread."""

    def __init__(self, model: Any, backbone_and_head: BackboneAndHead, vocab_size: int, context_length: int) -> None:
        """Start without sequences. Raises LoadError if the model's caches cannot drop tokens.

        vocab_size      logits of the model that verifies; the draft's own are cut or filled up to as many
        context_length  tokens that the draft can hold
        """
        if not kv_rollback.can_drop_last(kv_cache.new(model)):
            raise LoadError(
                "it keeps a state or a sliding window, from which rejected tokens cannot be dropped; "
                "expected one whose layers all keep keys and values of every token"
            )
        self.has_prefilled = False
        self._model = model
        self._split = backbone_and_head
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._cache: Cache = []
        self._rows: list[Sequence] = []  # in the order of the cache's rows
        self._cached_ids: dict[Sequence, list[int]] = {}  # of each row
        self._begun: dict[Sequence, tuple[Cache, int]] = {}  # prompts that are no rows yet: their first n tokens

    def max_proposed(self, position: int) -> int:
        """Return how many tokens after the one at `position` the draft's context has room for."""
        return max(0, self._context_length - position - 1)

    def propose(self, sequences: list[Sequence], num_tokens: int) -> list[Proposal]:
        """Propose tokens for each sequence, as many as its context has room for, once it was read. Waits for them.

        The caches of all other sequences are dropped.
        """
        self.has_prefilled = False
        asked = set(sequences)
        self.forget([known for known in (*self._rows, *self._begun) if known not in asked])
        self._drop_rejected()
        num_free = MAX_READ
        for sequence in sorted(sequences, key=self._num_missing):
            num_free -= self._read(sequence, num_free)
        if not self._rows:
            return [Proposal()] * len(sequences)
        num_tokens = min(num_tokens, min(self.max_proposed(len(row.token_ids) - 1) for row in self._rows))
        token_ids, logprobs = self._generate(num_tokens)
        made = {
            row: Proposal(tuple(ids), tuple(values))
            for row, ids, values in zip(self._rows, token_ids, logprobs, strict=True)
        }
        for row in self._rows:
            self._cached_ids[row] = [*row.token_ids, *made[row].token_ids[:-1]]
        return [made.get(sequence, Proposal()) for sequence in sequences]

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Drop the caches of these sequences. One without a cache is ignored."""
        gone = set(sequences)
        for sequence in gone:
            self._begun.pop(sequence, None)
        gone = {sequence for sequence in gone if self._cached_ids.pop(sequence, None) is not None}
        if not gone:
            return
        kept = [number for number, row in enumerate(self._rows) if row not in gone]
        self._rows = [self._rows[number] for number in kept]
        if kept:
            kv_cache.keep_rows(self._cache, kept)
        else:
            self._cache = []

    def close(self) -> None:
        """Drop the weights and all caches, for good."""
        self._cached_ids.clear()
        self._begun.clear()
        self._rows, self._cache = [], []
        del self._model, self._split
        garbage.collect()

    def _drop_rejected(self) -> None:
        """Drop what is cached of tokens that were not kept, and the last token, which is to be run again."""
        counts: list[int] = []
        for row in self._rows:
            cached = self._cached_ids[row]
            num_kept = min(_num_equal(cached, row.token_ids), len(row.token_ids) - 1)
            counts.append(len(cached) - num_kept)
            self._cached_ids[row] = cached[:num_kept]
        if any(counts):
            kv_rollback.drop_last(self._cache, counts)

    def _num_missing(self, sequence: Sequence) -> int:
        """Count the tokens of a sequence, but its last one, that are in no cache."""
        _, num_begun = self._begun.get(sequence, (None, 0))
        return len(sequence.token_ids) - 1 - len(self._cached_ids.get(sequence, ())) - num_begun

    def _read(self, sequence: Sequence, most: int) -> int:
        """Run tokens of a sequence, but its last one, if many are missing: at most `most`. Return how many.

        They run in a cache of their own, which becomes a row when none is missing.
        """
        num_missing = self._num_missing(sequence)
        if sequence in self._cached_ids:
            if num_missing <= MAX_MISSING:
                return 0
            lagging = kv_cache.take_row(self._cache, self._rows.index(sequence)), len(self._cached_ids[sequence])
            self.forget([sequence])
            self._begun[sequence] = lagging
        cache, start = self._begun.pop(sequence) if sequence in self._begun else (kv_cache.new(self._model), 0)
        end = start + min(num_missing, most)
        for first in range(start, end, MAX_CHUNK):
            chunk = sequence.token_ids[first : min(first + MAX_CHUNK, end)]
            self._split.forward_hidden(mx.array([chunk]), cache)
            mx.eval(kv_cache.arrays(cache))
            self.has_prefilled = True
        if end - start < num_missing:
            self._begun[sequence] = cache, end
        else:
            self._join(sequence, cache)
        return end - start

    def _join(self, sequence: Sequence, cache: Cache) -> None:
        """Append a row, whose cache holds all of its tokens but the last one."""
        merged = kv_cache.merge([cache])
        if self._cache:
            kv_cache.extend(self._cache, merged)
        else:
            self._cache = merged
        self._rows.append(sequence)
        self._cached_ids[sequence] = sequence.token_ids[:-1]

    def _generate(self, num_tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return the next tokens of each row and their logprobs, [rows][num_tokens]."""
        if num_tokens < 1:
            return [[] for _ in self._rows], [[] for _ in self._rows]
        hidden = self._run_missing()
        token_ids: list[mx.array] = []
        logprobs: list[mx.array] = []
        for number in range(num_tokens):
            if number:
                kv_cache.set_padding(self._cache, {len(row.token_ids) + number - 1 for row in self._rows})
                hidden = self._split.forward_hidden(token_ids[-1][:, None], self._cache).squeeze(1)
            drawn, values = self._draw(hidden, number)
            token_ids.append(drawn)
            logprobs.append(values)
            mx.async_eval(drawn, values)
        found, values = mx.stack(token_ids, axis=1), mx.stack(logprobs, axis=1)
        mx.eval(found, values, kv_cache.arrays(self._cache))
        return found.tolist(), values.tolist()  # type: ignore[return-value]

    def _run_missing(self) -> mx.array:
        """Run the tokens of each row that are not cached. Return the hidden states of the last ones [rows, width]."""
        missing = [row.token_ids[len(self._cached_ids[row]) :] for row in self._rows]
        lengths = [len(token_ids) for token_ids in missing]
        longest = max(lengths)
        is_padded = min(lengths) < longest
        padded = mx.array([token_ids + [0] * (longest - len(token_ids)) for token_ids in missing])
        if is_padded:
            kv_cache.begin_right_padding(self._cache, lengths)
        kv_cache.set_padding(self._cache, {len(self._cached_ids[row]) for row in self._rows})
        hidden = self._split.forward_hidden(padded, self._cache)
        if is_padded:
            kv_cache.end_right_padding(self._cache)
        return hidden[mx.arange(len(lengths)), mx.array(lengths) - 1]

    def _draw(self, hidden: mx.array, number: int) -> tuple[mx.array, mx.array]:
        """Draw token `number` of the proposals from hidden states [rows, width]. Return tokens and logprobs [rows]."""
        return draw_proposed(self._fit(self._split.compute_logits(hidden).astype(mx.float32)), self._rows, number)

    def _fit(self, logits: mx.array) -> mx.array:
        """Cut or fill up rows of logits to the vocabulary of the model that verifies."""
        missing = self._vocab_size - logits.shape[-1]
        if missing > 0:
            return mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
        return logits[:, : self._vocab_size]


def draw_proposed(logits: mx.array, rows: list[Sequence], number: int) -> tuple[mx.array, mx.array]:
    """Draw token `number` of each row's proposals from logits [rows, vocab] float32. Return tokens and logprobs."""
    samplings: list[Sampling] = []
    keys: list[int] = []
    for row in rows:
        if row.sampling is None:
            raise ValueError("a sequence that does not generate has no proposals")
        samplings.append(row.sampling)
        keys.append(sample.noise_key(row.noise_seed, row.num_generated + number))
    token_ids = sample.sample(logits, samplings, keys).token_ids
    return token_ids, scoring.logprobs(logits, scoring.log_normalizer(logits), token_ids)


def _num_equal(one: list[int], other: list[int]) -> int:
    """Count the leading tokens that two lists have in common."""
    if one == other[: len(one)]:
        return len(one)
    pairs = zip(one, other, strict=False)  # up to the end of the shorter one
    return next((number for number, (first, second) in enumerate(pairs) if first != second), min(len(one), len(other)))
