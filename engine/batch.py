"""Rows through the model, with their caches. The only file that touches mlx-lm's cache internals (0.32).

A prefill is right-padded: pads come after the tokens, so no causal model sees them, and `finalize` turns them
out of the caches. What is left of a prefill joins the decoding batch, whose caches are left-padded to the
longest row:

    prefill     a a a a .      decoding    . a a a a | next
                b b . . .  ──►             . . . b b | next
                c c c c c                  c c c c c | next

To serve a cache kind that cannot be batched, a model is run by `Single`, one row a forward.
"""

from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engine.scheduler import Chunk
from engine.sequence import Sequence
from engine.tap import Halves

Cache = list[Any]  # one of mlx-lm's a layer


class Batch(Protocol):
    def prefill(self, chunks: list[Chunk]) -> mx.array:
        """Hidden states [n, width] of the chunks' predictors, in order, evaluated. Keeps what rows go on with."""

    def decode(self, sequences: list[Sequence]) -> mx.array:
        """Hidden states [rows, width] of each row's last token, evaluated. `sequences` are all that decode."""

    def release(self, sequences: list[Sequence]) -> None:
        """Drop their caches; a row without one is passed over."""


class Merged:
    """All rows in one forward."""

    def __init__(self, model: Any, halves: Halves) -> None:
        self._model = model
        self._halves = halves
        self._half_way: dict[Sequence, Cache] = {}  # prompts that go on in the next chunk
        self._rows: list[Sequence] = []  # decoding, in the order of the cache's rows
        self._cache: Cache = []

    def prefill(self, chunks: list[Chunk]) -> mx.array:
        lengths = [chunk.end - chunk.start for chunk in chunks]
        pads = [max(lengths) - length for length in lengths]
        padded = [_tokens(chunk) + [0] * pad for chunk, pad in zip(chunks, pads, strict=True)]
        cache = self._cache_of(chunks)
        if any(pads):
            for layer in cache:
                layer.prepare(lengths=lengths, right_padding=pads)
        hidden = self._halves.hidden(mx.array(padded), cache or None)
        rows = hidden.reshape(-1, hidden.shape[-1])[_predictor_index(chunks, hidden.shape[1])]
        if any(pads):
            for layer in cache:
                layer.finalize()
        mx.eval(rows, [layer.state for layer in cache])
        if cache:
            self._keep(chunks, cache)
        return rows

    def decode(self, sequences: list[Sequence]) -> mx.array:
        if sequences != self._rows:
            raise RuntimeError("the scheduler's decoding rows are not those that have caches")
        last = mx.array([[sequence.token_ids[-1]] for sequence in sequences])
        rows = self._halves.hidden(last, self._cache)[:, -1]
        mx.eval(rows, [layer.state for layer in self._cache])
        return rows

    def release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._half_way.pop(sequence, None)
        gone = set(sequences)
        kept = [row for row, sequence in enumerate(self._rows) if sequence not in gone]
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[row] for row in kept]
        self._cache = _only(self._cache, kept)

    def _cache_of(self, chunks: list[Chunk]) -> Cache:
        """None is needed, and [] is returned, where every row begins and ends in this forward."""
        if all(chunk.start == 0 and not chunk.leaves_cache for chunk in chunks):
            return []
        single = [self._half_way.pop(chunk.sequence, []) or make_prompt_cache(self._model) for chunk in chunks]
        return [layers[0].merge(list(layers)) for layers in zip(*single, strict=True)]

    def _keep(self, chunks: list[Chunk], cache: Cache) -> None:
        """Rows half way get a cache of their own, rows that generate join the decoding ones."""
        for row, chunk in enumerate(chunks):
            if not chunk.is_last:
                self._half_way[chunk.sequence] = [layer.extract(row) for layer in cache]
        joining = [row for row, chunk in enumerate(chunks) if chunk.is_last and chunk.leaves_cache]
        joined = _only(cache, joining)
        if self._cache and joined:
            for layer, other in zip(self._cache, joined, strict=True):
                layer.extend(other)
        elif joined:
            self._cache = joined
        self._rows += [chunks[row].sequence for row in joining]
        states = [layer.state for layer in self._cache]
        mx.eval(states, [[layer.state for layer in layers] for layers in self._half_way.values()])


class Single:
    """One row a forward, with the caches that mlx-lm gives a single row."""

    def __init__(self, model: Any, halves: Halves) -> None:
        self._model = model
        self._halves = halves
        self._caches: dict[Sequence, Cache] = {}

    def prefill(self, chunks: list[Chunk]) -> mx.array:
        return mx.concatenate([self._prefill(chunk) for chunk in chunks])

    def decode(self, sequences: list[Sequence]) -> mx.array:
        return mx.concatenate(
            [self._forward([sequence.token_ids[-1]], self._caches[sequence])[0] for sequence in sequences]
        )

    def release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._caches.pop(sequence, None)

    def _prefill(self, chunk: Chunk) -> mx.array:
        cache = self._caches.pop(chunk.sequence, []) or make_prompt_cache(self._model)
        hidden = self._forward(_tokens(chunk), cache)
        if chunk.leaves_cache:
            self._caches[chunk.sequence] = cache
        return hidden[0][_predictor_index([chunk], hidden.shape[1])]

    def _forward(self, token_ids: list[int], cache: Cache) -> mx.array:
        hidden = self._halves.hidden(mx.array([token_ids]), cache)
        mx.eval(hidden, [layer.state for layer in cache])
        return hidden


def _tokens(chunk: Chunk) -> list[int]:
    return chunk.sequence.token_ids[chunk.start : chunk.end]


def _predictor_index(chunks: list[Chunk], width: int) -> mx.array:
    """Where the chunks' predictors are in the flattened [rows, width]."""
    index = [row * width + position - chunk.start for row, chunk in enumerate(chunks) for position in chunk.predictors]
    return mx.array(index, dtype=mx.int32)


def _only(cache: Cache, rows: list[int]) -> Cache:
    """The cache of these of its rows; [] of none."""
    if not rows:
        return []
    index = mx.array(rows)
    for layer in cache:
        layer.filter(index)
    return cache
