"""Numbers about one token under the model's distribution. Pure functions of logits.

logits      [rows, vocab]  float32, cast and, where asked, divided by the temperature before anything is
                           normalised; in bf16 the normalisation alone errs by up to 0.12 nats
token_ids   [rows]         int
Every result is natural log or nats, float32, and lazy.
"""

import mlx.core as mx


def log_normalizer(logits: mx.array) -> mx.array:
    """[rows]. Not finite where a row holds NaN or +inf, or nothing but -inf: such a row has no distribution.

    In two levels: float32's error grows with the terms of a sum, and on a CPU one sum over a vocabulary of
    151,936 is 3e-4 nats off. The sum of sums is 2e-6 off, and costs 6 % more.
    """
    return mx.logsumexp(mx.logsumexp(_blocks(logits, _BLOCK), axis=-1), axis=-1)


def logprobs(logits: mx.array, normalizer: mx.array, token_ids: mx.array) -> mx.array:
    """[rows]: log p of one token a row; -inf where the model excludes it."""
    return _of_tokens(logits, token_ids)[:, 0] - normalizer


def logprobs_of_many(logits: mx.array, normalizer: mx.array, token_ids: mx.array) -> mx.array:
    """[rows, k]: log p of the k tokens of each row, token_ids [rows, k]."""
    return mx.take_along_axis(logits, token_ids, axis=-1) - normalizer[:, None]


def ranks(logits: mx.array, token_ids: mx.array) -> mx.array:
    """[rows] int: 1 is the likeliest; of equal ones the smaller id is first, as in `top_k`."""
    chosen = _of_tokens(logits, token_ids)
    ids = mx.arange(logits.shape[-1])[None]
    before = (logits > chosen) | ((logits == chosen) & (ids < token_ids[:, None]))
    return before.sum(axis=-1) + 1


def entropies(logits: mx.array, normalizer: mx.array) -> mx.array:
    """[rows] nats: -sum p log p, where p = 0 adds 0. Summed in two levels, as the normalizer is."""
    logprobs = _blocks(logits, _BLOCK) - normalizer[:, None, None]
    terms = mx.where(logprobs > -mx.inf, mx.exp(logprobs) * logprobs, 0)
    return -terms.sum(axis=-1).sum(axis=-1)


def top_k(logits: mx.array, k: int) -> mx.array:
    """[rows, k] ids, likeliest first, of equal ones the smaller id first. Exact, 1 <= k <= vocab.

    In levels, for a sort of the whole vocabulary costs ten times as much: the k likeliest tokens lie in the k
    blocks whose maxima come first in the same order. The sorts are stable and blocks stay in order of ids, so
    ties hold.
    """
    ids = mx.broadcast_to(mx.arange(logits.shape[-1]), logits.shape)
    for size in (_BLOCK, 16):
        if logits.shape[-1] <= 2 * k * size:
            continue
        blocks, block_ids = _blocks(logits, size), _blocks(ids, size, padding=_NO_TOKEN)
        best = mx.sort(mx.argsort(-blocks.max(axis=-1), axis=-1)[:, :k], axis=-1)[:, :, None]
        logits = mx.take_along_axis(blocks, best, axis=1).reshape(logits.shape[0], -1)
        ids = mx.take_along_axis(block_ids, best, axis=1).reshape(logits.shape[0], -1)
    order = mx.argsort(-logits, axis=-1)[:, :k]
    return mx.take_along_axis(ids, order, axis=-1)


_BLOCK = 512
_NO_TOKEN = 2**31 - 1  # stands beside the -inf of padding, which no top-k reaches: padding is behind every token


def _blocks(values: mx.array, size: int, padding: float = -mx.inf) -> mx.array:
    """[rows, n] to [rows, ceil(n / size), size]."""
    num_blocks = -(-values.shape[-1] // size)
    missing = num_blocks * size - values.shape[-1]
    if missing:
        values = mx.pad(values, [(0, 0), (0, missing)], constant_values=padding)
    return values.reshape(values.shape[0], num_blocks, size)


def _of_tokens(logits: mx.array, token_ids: mx.array) -> mx.array:
    """[rows, 1]"""
    return mx.take_along_axis(logits, token_ids[:, None], axis=-1)
