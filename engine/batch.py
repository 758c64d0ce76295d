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

from typing import Any, Protocol

import mlx.core as mx

from engine import cache as caches
from engine.cache import Cache
from engine.prefixes import Prefix
from engine.scheduler import Chunk
from engine.sequence import Sequence
from engine.tap import Halves

TILE = 64  # tokens; every forward of Exact has this length


class Batch(Protocol):
    """Results are on their way: nothing here waits for the device."""

    can_share: bool  # rows can go on from a computed prefix

    def prefill(self, chunks: list[Chunk]) -> mx.array:
        """Hidden states [n, width] of the chunks' predictors, in order. Keeps what rows go on with."""

    def decode(self, sequences: list[Sequence], last_ids: mx.array) -> mx.array:
        """Hidden states [rows, width] of each row's last token. `sequences` are all that decode."""

    def release(self, sequences: list[Sequence]) -> None:
        """Drop their caches; a row without one is passed over."""


class Merged:
    """All rows in one forward."""

    def __init__(self, model: Any, halves: Halves, can_share: bool = True) -> None:
        self.can_share = can_share and caches.can_be_shared(caches.new(model))
        self._model = model
        self._halves = halves
        self._half_way: dict[Sequence, Cache] = {}  # prompts that go on in the next chunk
        self._rows: list[Sequence] = []  # decoding, in the order of the cache's rows
        self._cache: Cache = []

    def prefill(self, chunks: list[Chunk]) -> mx.array:
        if chunks[0].is_part:
            (chunk,) = chunks
            return self._prefill_part(chunk)
        if chunks[0].leaves_cache:
            return self._prefill_joining(chunks)
        bases = [chunk.base.cache for chunk in chunks if chunk.base]
        return _launched(self._forward(chunks, caches.lent(bases) if bases else None), [])

    def decode(self, sequences: list[Sequence], last_ids: mx.array) -> mx.array:
        if sequences != self._rows:
            raise RuntimeError("the scheduler's decoding rows are not those that have caches")
        rows = self._halves.hidden(last_ids[:, None], self._cache)[:, -1]
        return _launched(rows, self._cache)

    def release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._half_way.pop(sequence, None)
        gone = set(sequences)
        kept = [row for row, sequence in enumerate(self._rows) if sequence not in gone]
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[row] for row in kept]
        for layer in self._cache if kept else ():
            layer.filter(mx.array(kept))
        if not kept:
            self._cache = []

    def _prefill_part(self, chunk: Chunk) -> mx.array:
        """A chunk of a long prompt, or a prefix, in a cache of its own."""
        cache = self._half_way.pop(chunk.sequence, None) or _first(chunk, self._model)
        rows = self._forward([chunk], cache)
        if not chunk.is_last:
            self._half_way[chunk.sequence] = cache
        elif chunk.into:
            cache = _kept(chunk.into, cache)
        elif chunk.leaves_cache:
            self._join([chunk.sequence], caches.merged([cache]))
            cache = self._cache
        return _launched(rows, cache)

    def _prefill_joining(self, chunks: list[Chunk]) -> mx.array:
        """Whole prompts that are to generate."""
        cache = caches.merged([chunk.base.cache if chunk.base else caches.new(self._model) for chunk in chunks])
        lengths = [chunk.num_tokens for chunk in chunks]
        pads = [max(lengths) - length for length in lengths]
        if any(pads):
            for layer in cache:
                layer.prepare(lengths=lengths, right_padding=pads)
        rows = self._forward(chunks, cache)
        if any(pads):
            for layer in cache:
                layer.finalize()
        self._join([chunk.sequence for chunk in chunks], cache)
        return _launched(rows, self._cache)

    def _join(self, sequences: list[Sequence], cache: Cache) -> None:
        for layer, other in zip(self._cache, cache, strict=True) if self._cache else ():
            layer.extend(other)
        self._cache = self._cache or cache
        self._rows += sequences

    def _forward(self, chunks: list[Chunk], cache: Cache | None) -> mx.array:
        """Hidden states of the predictors."""
        longest = max(chunk.num_tokens for chunk in chunks)
        hidden = self._halves.hidden(mx.array([_padded(_tokens(chunk), longest) for chunk in chunks]), cache)
        index = [
            row * longest + position - chunk.start for row, chunk in enumerate(chunks) for position in chunk.predictors
        ]
        return hidden.reshape(-1, hidden.shape[-1])[mx.array(index, dtype=mx.int32)]


class Single:
    """One row a forward, with the caches that mlx-lm gives a single row."""

    def __init__(self, model: Any, halves: Halves, can_share: bool = True) -> None:
        self.can_share = can_share and caches.can_be_shared(caches.new(model))
        self._model = model
        self._halves = halves
        self._caches: dict[Sequence, Cache] = {}

    def prefill(self, chunks: list[Chunk]) -> mx.array:
        return mx.concatenate([self._prefill(chunk) for chunk in chunks])

    def decode(self, sequences: list[Sequence], last_ids: mx.array) -> mx.array:
        rows = zip(sequences, last_ids, strict=True)
        return mx.concatenate([self._forward(last_id[None, None], self._caches[row])[0] for row, last_id in rows])

    def release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._caches.pop(sequence, None)

    def _prefill(self, chunk: Chunk) -> mx.array:
        cache = self._caches.pop(chunk.sequence, None) or _first(chunk, self._model)
        hidden = self._forward(mx.array([_tokens(chunk)]), cache)
        if chunk.into and chunk.is_last:
            _launched(hidden, _kept(chunk.into, cache))
        elif chunk.leaves_cache:
            self._caches[chunk.sequence] = cache
        return _of_predictors(hidden[0], chunk, chunk.start)

    def _forward(self, token_ids: mx.array, cache: Cache) -> mx.array:
        return _launched(self._halves.hidden(token_ids, cache), cache)


class Exact:
    """One row a forward, cut into tiles at the multiples of TILE and padded to a whole one.

    A kernel's rounding follows the shapes that it is given. Here they follow from a token's position alone: which
    tile it is in, and how many tiles came before. A tile that is not full yet runs on a copy of the cache and is run
    again, from its beginning, when more of its tokens are there; so a generated token costs a tile.
    """

    def __init__(self, model: Any, halves: Halves, can_share: bool = True) -> None:
        self.can_share = can_share and caches.can_be_shared(caches.new(model))
        self._model = model
        self._halves = halves
        self._caches: dict[Sequence, Cache] = {}  # of the full tiles

    def prefill(self, chunks: list[Chunk]) -> mx.array:
        return mx.concatenate([self._prefill(chunk) for chunk in chunks])

    def decode(self, sequences: list[Sequence], last_ids: mx.array) -> mx.array:
        return mx.concatenate([self._decode(row, last_id) for row, last_id in zip(sequences, last_ids, strict=True)])

    def release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._caches.pop(sequence, None)

    def _prefill(self, chunk: Chunk) -> mx.array:
        cache = self._caches.pop(chunk.sequence, None) or _first(chunk, self._model)
        first = start = chunk.start // TILE * TILE
        tiles: list[mx.array] = []
        while start < chunk.end:
            end = min(start + TILE, chunk.end)
            hidden, cache = self._tile(mx.array(chunk.sequence.token_ids[start:end]), cache)
            tiles.append(hidden)
            start = end
        if chunk.into and chunk.is_last:
            _launched(hidden, _kept(chunk.into, cache))
        elif chunk.leaves_cache:
            self._caches[chunk.sequence] = cache
        return _of_predictors(mx.concatenate(tiles), chunk, first)

    def _decode(self, sequence: Sequence, last_id: mx.array) -> mx.array:
        position = sequence.num_computed
        start = position // TILE * TILE
        known = mx.array(sequence.token_ids[start:position], dtype=last_id.dtype)
        hidden, self._caches[sequence] = self._tile(mx.concatenate([known, last_id[None]]), self._caches[sequence])
        return hidden[position - start][None]

    def _tile(self, token_ids: mx.array, cache: Cache) -> tuple[mx.array, Cache]:
        """Hidden states [TILE, width], and the cache of all full tiles."""
        missing = TILE - token_ids.shape[0]
        grown = caches.copied(cache)
        hidden = self._halves.hidden(mx.pad(token_ids, (0, missing))[None], grown)[0]
        return (_launched(hidden, []), cache) if missing else (_launched(hidden, grown), grown)


def _tokens(chunk: Chunk) -> list[int]:
    return chunk.sequence.token_ids[chunk.start : chunk.end]


def _padded(token_ids: list[int], length: int) -> list[int]:
    return token_ids + [0] * (length - len(token_ids))


def _first(chunk: Chunk, model: Any) -> Cache:
    """The cache that a row begins with."""
    return caches.copied(chunk.base.cache) if chunk.base else caches.new(model)


def _kept(prefix: Prefix, cache: Cache) -> Cache:
    """What rows are to go on from; compact, so not what the row that computed it had."""
    compact = caches.compact(cache)
    prefix.cache, prefix.num_bytes = compact, caches.num_bytes(compact)
    return compact


def _of_predictors(hidden: mx.array, chunk: Chunk, start: int) -> mx.array:
    """Of hidden states [length, width] from position `start` on."""
    index = [position - start for position in chunk.predictors]
    return hidden[mx.array(index, dtype=mx.int32)]


def _launched(hidden: mx.array, cache: Cache) -> mx.array:
    """Hidden states, on their way together with what is kept."""
    mx.async_eval(hidden, caches.arrays(cache))
    return hidden
