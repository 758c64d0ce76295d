"""Rows through the model, with their caches: what one forward is, and what rows go on with after it.

A prefill is right-padded: pads come after the tokens, so no causal model sees them. What generates joins the
decoding batch, whose caches are left-padded to the longest row:

    prefill     a a a a .      decoding    . a a a a | next
                b b . . .  ──►             . . . b b | next
                c c c c c                  c c c c c | next

Three ways to run rows:

    Merged   all rows in one forward
    Single   one row a forward, for a model whose caches cannot be batched
    Exact    one row a forward, in tiles of one size, so that a row's numbers are bit for bit the same whatever
             runs beside it, before it or after it
"""

import sys
from dataclasses import replace
from typing import Any, Protocol

import mlx.core as mx

from scorepool.engine.model import kv_cache
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.kv_cache import Cache
from scorepool.engine.scheduling.prefix_cache import Prefix
from scorepool.engine.scheduling.scheduler import Chunk
from scorepool.engine.sequence import Sequence

CPU_QUERIES = 256  # tokens of one row that a CPU runs at a time
TILE = 64  # tokens; every forward of Exact has this length


class BatchRunner(Protocol):
    """Nothing here waits for the device: results are on their way, or lazy."""

    can_share: bool  # rows can go on from a computed prefix

    def prefill(self, chunks: list[Chunk]) -> mx.array:
        """Hidden states [n, width] of the chunks' predictors, in order. Keeps what rows go on with."""

    def decode(self, sequences: list[Sequence], last_ids: mx.array) -> mx.array:
        """Hidden states [rows, width] of each row's last token. `sequences` are all that decode."""

    def release(self, sequences: list[Sequence]) -> None:
        """Drop their caches; a row without one is passed over."""


class PaddedBatch:
    """All rows in one forward."""

    def __init__(self, model: Any, halves: BackboneAndHead, can_share: bool = True) -> None:
        self.can_share = can_share and kv_cache.can_be_shared(kv_cache.new(model))
        self._model = model
        self._halves = halves
        # A CPU computes all of the attention's rectangle, of which a causal model uses half: less, in slices.
        self._max_queries = CPU_QUERIES if mx.default_device() == mx.cpu else sys.maxsize
        self._half_way: dict[Sequence, Cache] = {}  # prompts that go on in the next chunk
        self._rows: list[Sequence] = []  # decoding, in the order of the cache's rows
        self._cache: Cache = []

    def prefill(self, chunks: list[Chunk]) -> mx.array:
        chunk = chunks[0]  # the longest
        if chunk.is_part or chunk.num_tokens > self._max_queries:
            return mx.concatenate([self._prefill_alone(chunk) for chunk in chunks])
        if chunk.leaves_cache:
            return self._prefill_joining(chunks)
        bases = [chunk.base.cache for chunk in chunks if chunk.base]
        hidden = self._forward(chunks, kv_cache.as_shared(bases) if bases else None) if chunk.num_tokens else None
        return _launched(_of_predictors(chunks, hidden), [])

    def decode(self, sequences: list[Sequence], last_ids: mx.array) -> mx.array:
        if sequences != self._rows:
            raise RuntimeError("the scheduler's decoding rows are not those that have caches")
        kv_cache.set_padding(self._cache, {sequence.num_computed for sequence in sequences})
        # The whole cache is computed together with the hidden states.
        return self._halves.forward_hidden(last_ids[:, None], self._cache).squeeze(1)

    def release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._half_way.pop(sequence, None)
        gone = set(sequences)
        kept = [row for row, sequence in enumerate(self._rows) if sequence not in gone]
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[row] for row in kept]
        if kept:
            kv_cache.keep_rows(self._cache, kept)
        else:
            self._cache = []

    def _prefill_alone(self, chunk: Chunk) -> mx.array:
        """One row in a cache of its own: a chunk of a long prompt, a prefix, or a row of many tokens."""
        cache = self._half_way.pop(chunk.sequence, None) or _first(chunk, self._model)
        parts: list[mx.array] = []
        for part in _cut(chunk, self._max_queries):
            mx.eval(parts[-1:])  # or the memory of several is taken at once
            hidden = self._forward([part], cache)
            parts.append(_launched(_of_predictors([part], hidden), cache))
        if not chunk.is_last:
            self._half_way[chunk.sequence] = cache
        elif chunk.into:
            cache = _kept(chunk.into, cache, hidden[0, -1:])
        elif chunk.leaves_cache:
            self._join([chunk.sequence], kv_cache.merge([cache]))
            cache = self._cache
        return _launched(mx.concatenate(parts), cache)

    def _prefill_joining(self, chunks: list[Chunk]) -> mx.array:
        """Whole prompts that are to generate."""
        cache = kv_cache.merge([chunk.base.cache if chunk.base else kv_cache.new(self._model) for chunk in chunks])
        lengths = [chunk.num_tokens for chunk in chunks]
        is_padded = len(set(lengths)) > 1
        if is_padded:
            kv_cache.begin_right_padding(cache, lengths)
        hidden = self._forward(chunks, cache) if any(lengths) else None
        if is_padded:
            kv_cache.end_right_padding(cache)
        self._join([chunk.sequence for chunk in chunks], cache)
        return _launched(_of_predictors(chunks, hidden), self._cache)

    def _join(self, sequences: list[Sequence], cache: Cache) -> None:
        if self._cache:
            kv_cache.extend(self._cache, cache)
        else:
            self._cache = cache
        self._rows += sequences

    def _forward(self, chunks: list[Chunk], cache: Cache | None) -> mx.array:
        """Hidden states [rows, longest, width]."""
        longest = max(chunk.num_tokens for chunk in chunks)
        return self._halves.forward_hidden(mx.array([_padded(_tokens(chunk), longest) for chunk in chunks]), cache)


class SequentialBatch:
    """One row a forward, with the caches that mlx-lm gives a single row."""

    def __init__(self, model: Any, halves: BackboneAndHead, can_share: bool = True) -> None:
        self.can_share = can_share and kv_cache.can_be_shared(kv_cache.new(model))
        self._model = model
        self._halves = halves
        self._cache_of: dict[Sequence, Cache] = {}

    def prefill(self, chunks: list[Chunk]) -> mx.array:
        return mx.concatenate([self._prefill(chunk) for chunk in chunks])

    def decode(self, sequences: list[Sequence], last_ids: mx.array) -> mx.array:
        rows = zip(sequences, last_ids, strict=True)
        return mx.concatenate([self._forward(last_id[None, None], self._cache_of[row])[0] for row, last_id in rows])

    def release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._cache_of.pop(sequence, None)

    def _prefill(self, chunk: Chunk) -> mx.array:
        cache = self._cache_of.pop(chunk.sequence, None) or _first(chunk, self._model)
        hidden = self._forward(mx.array([_tokens(chunk)]), cache) if chunk.num_tokens else None
        if chunk.into and chunk.is_last and hidden is not None:
            _launched(hidden, _kept(chunk.into, cache, hidden[0, -1:]))
        elif chunk.leaves_cache:
            self._cache_of[chunk.sequence] = cache
        return _of_predictors([chunk], hidden)

    def _forward(self, token_ids: mx.array, cache: Cache) -> mx.array:
        return _launched(self._halves.forward_hidden(token_ids, cache), cache)


class BatchInvariant:
    """One row a forward, cut into tiles at the multiples of TILE and padded to a whole one.

    A kernel's rounding follows the shapes that it is given. Here they follow from a token's position alone: which
    tile it is in, and how many tiles came before. A tile that is not full yet runs on a copy of the cache and is run
    again, from its beginning, when more of its tokens are there; so a generated token costs a tile.
    """

    def __init__(self, model: Any, halves: BackboneAndHead, can_share: bool = True) -> None:
        self.can_share = can_share and kv_cache.can_be_shared(kv_cache.new(model))
        self._model = model
        self._halves = halves
        self._cache_of: dict[Sequence, Cache] = {}  # of the full tiles

    def prefill(self, chunks: list[Chunk]) -> mx.array:
        return mx.concatenate([self._prefill(chunk) for chunk in chunks])

    def decode(self, sequences: list[Sequence], last_ids: mx.array) -> mx.array:
        return mx.concatenate([self._decode(row, last_id) for row, last_id in zip(sequences, last_ids, strict=True)])

    def release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._cache_of.pop(sequence, None)

    def _prefill(self, chunk: Chunk) -> mx.array:
        cache = self._cache_of.pop(chunk.sequence, None) or _first(chunk, self._model)
        first = start = chunk.start // TILE * TILE
        tiles: list[mx.array] = []
        while chunk.num_tokens and start < chunk.end:
            end = min(start + TILE, chunk.end)
            tile, cache = self._tile(mx.array(chunk.sequence.token_ids[start:end]), cache)
            tiles.append(tile)
            start = end
        hidden = mx.concatenate(tiles)[None, chunk.start - first :] if tiles else None
        if chunk.into and chunk.is_last and hidden is not None:
            last = hidden[0, chunk.num_tokens - 1 : chunk.num_tokens]
            _launched(last, _kept(chunk.into, cache, last))
        elif chunk.leaves_cache:
            self._cache_of[chunk.sequence] = cache
        return _of_predictors([chunk], hidden)

    def _decode(self, sequence: Sequence, last_id: mx.array) -> mx.array:
        position = sequence.num_computed
        start = position // TILE * TILE
        known = mx.array(sequence.token_ids[start:position], dtype=last_id.dtype)
        hidden, self._cache_of[sequence] = self._tile(mx.concatenate([known, last_id[None]]), self._cache_of[sequence])
        return hidden[position - start][None]

    def _tile(self, token_ids: mx.array, cache: Cache) -> tuple[mx.array, Cache]:
        """Hidden states [TILE, width], and the cache of all full tiles."""
        missing = TILE - token_ids.shape[0]
        grown = kv_cache.clone(cache)
        hidden = self._halves.forward_hidden(mx.pad(token_ids, (0, missing))[None], grown)[0]
        return (_launched(hidden, []), cache) if missing else (_launched(hidden, grown), grown)


def _tokens(chunk: Chunk) -> list[int]:
    return chunk.sequence.token_ids[chunk.start : chunk.end]


def _padded(token_ids: list[int], length: int) -> list[int]:
    return token_ids + [0] * (length - len(token_ids))


def _first(chunk: Chunk, model: Any) -> Cache:
    """The cache that a row begins with."""
    return kv_cache.clone(chunk.base.cache) if chunk.base else kv_cache.new(model)


def _cut(chunk: Chunk, max_tokens: int) -> list[Chunk]:
    starts = range(chunk.start, chunk.end, max_tokens)
    bases = [chunk.base, *[None] * (len(starts) - 1)]
    return [
        replace(chunk, start=start, end=min(start + max_tokens, chunk.end), base=base)
        for start, base in zip(starts, bases, strict=True)
    ]


def _kept(prefix: Prefix, cache: Cache, last: mx.array) -> Cache:
    """What rows are to go on from; compact, so not what the row that computed it had. `last` [1, width]."""
    compact = kv_cache.compact(cache)
    prefix.cache, prefix.num_bytes, prefix.last = compact, kv_cache.num_bytes(compact), mx.contiguous(last)
    mx.async_eval(prefix.last)  # until it is computed it holds the hidden states of the whole chunk
    return compact


def _of_predictors(chunks: list[Chunk], hidden: mx.array | None) -> mx.array:
    """[n, width] of hidden states [rows, length, width] that begin where each chunk does. None: all are empty."""
    lasts = [chunk.base.last for chunk in chunks if chunk.base and chunk.is_predicted_by_base]
    states = lasts if hidden is None else [*lasts, hidden.reshape(-1, hidden.shape[-1])]
    length = 0 if hidden is None else hidden.shape[1]
    index: list[int] = []
    num_lasts = 0
    for row, chunk in enumerate(chunks):
        for position in chunk.predictors:
            if position < chunk.start:
                index.append(num_lasts)
                num_lasts += 1
            else:
                index.append(len(lasts) + row * length + position - chunk.start)
    return mx.concatenate(states)[mx.array(index, dtype=mx.int32)]


def _launched(hidden: mx.array, cache: Cache) -> mx.array:
    """Hidden states, on their way together with what is kept."""
    mx.async_eval(hidden, kv_cache.arrays(cache))
    return hidden
