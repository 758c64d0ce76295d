"""Sample the next token of each row. Pure: the same logits, Sampling and seeds give the same tokens in any batch.

Each row has its own noise, keyed by its seed and the index of the token, so a seed's tokens do not depend on the batch.
A token is drawn as argmax(logits / temperature + Gumbel noise), which is a draw from the softmax.

Filters apply in transformers' order: temperature, top-k, top-p of the probability that top-k left, min-p.
"""

from hashlib import blake2b
from typing import NamedTuple

import mlx.core as mx

from scorepool.engine.sampling import scoring
from scorepool.engine.sequence import Sampling

MIN_TEMPERATURE = 1e-30  # a lower one could be 0 in float32; here only the most likely tokens have any probability


def noise_key(seed: int, index: int) -> int:
    """Return the key of the noise for a row's generated token number `index`. Neighbouring seeds are unrelated."""
    packed = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


class Sampled(NamedTuple):
    """Tokens that were drawn, and the distributions that they were drawn from."""

    token_ids: mx.array  # [rows] int32
    logprobs: mx.array  # [rows] under the sampled distribution: 0 for a greedy row
    logits: mx.array  # [rows, vocab] of the sampled distribution; as given for a greedy row


def sample(logits: mx.array, samplings: list[Sampling], keys: list[int]) -> Sampled:
    """Draw a token for each row of logits [rows, vocab] float32; one Sampling and one noise key per row.

    A row with NaN returns some token and the logprob NaN, or 0 if it is greedy.
    """
    rows = [row for row, sampling in enumerate(samplings) if sampling.temperature]
    if len(rows) == len(samplings):
        return _draw(logits, samplings, keys)
    token_ids, logprobs = mx.argmax(logits, axis=-1).astype(mx.int32), mx.zeros(logits.shape[0])
    if rows:
        index = mx.array(rows)
        drawn = _draw(logits[index], [samplings[row] for row in rows], [keys[row] for row in rows])
        token_ids[index], logprobs[index] = drawn.token_ids, drawn.logprobs
        logits = replace_rows(logits, index, drawn.logits)
    return Sampled(token_ids, logprobs, logits)


def replace_rows(array: mx.array, index: mx.array, rows: mx.array) -> mx.array:
    """Return a copy of an array [n, ...] with other rows at `index`. It is computed if somebody reads it."""
    copied = mx.array(array)
    copied[index] = rows
    return copied


def _draw(logits: mx.array, samplings: list[Sampling], keys: list[int]) -> Sampled:
    scaled = filter_logits(logits, samplings)
    noise = mx.stack([mx.random.gumbel(logits.shape[-1:], key=mx.random.key(key)) for key in keys])
    token_ids = mx.argmax(scaled + noise, axis=-1).astype(mx.int32)
    chosen = mx.take_along_axis(scaled, token_ids[:, None], axis=-1)[:, 0]
    return Sampled(token_ids, chosen - scoring.log_normalizer(scaled), scaled)


def filter_logits(logits: mx.array, samplings: list[Sampling]) -> mx.array:
    """Divide by the temperatures, then set to -inf what top-k, top-p or min-p excludes. No temperature may be 0.

    Returns [rows, vocab] float32; the largest of each row is 0. Rows without a filter are not computed for it.
    """
    temperature = mx.array([max(sampling.temperature, MIN_TEMPERATURE) for sampling in samplings])[:, None]
    # The largest logit becomes 0 before the division, so that no temperature overflows.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    for applies, keep in ((_has_top_k_or_top_p, _top_k_top_p_mask), (_has_min_p, _min_p_mask)):
        rows = [row for row, sampling in enumerate(samplings) if applies(sampling)]
        if rows:
            index = mx.array(rows)
            filtered = scaled[index]
            kept = keep(filtered, [samplings[row] for row in rows])
            scaled[index] = mx.where(kept, filtered, -mx.inf)
    return scaled


def _has_top_k_or_top_p(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1


def _has_min_p(sampling: Sampling) -> bool:
    return sampling.min_p > 0


def _top_k_top_p_mask(scaled: mx.array, samplings: list[Sampling]) -> mx.array:
    """Keep the top_k most likely tokens, then the fewest that hold top_p of their probability; break ties by id."""
    vocab_size = scaled.shape[-1]
    order = mx.argsort(-scaled, axis=-1)
    rank = mx.arange(vocab_size)[None]
    in_top_k = rank < mx.array([min(sampling.top_k or vocab_size, vocab_size) for sampling in samplings])[:, None]
    probabilities = mx.softmax(mx.where(in_top_k, mx.take_along_axis(scaled, order, axis=-1), -mx.inf), axis=-1)
    before = mx.cumsum(probabilities, axis=-1, inclusive=False)
    top_p = mx.array([sampling.top_p if sampling.top_p < 1 else mx.inf for sampling in samplings])[:, None]
    kept = in_top_k & ((before < top_p) | (rank == 0))  # keep the first even if top_p is 0 in float32
    return mx.put_along_axis(mx.zeros(kept.shape, mx.bool_), order, kept, axis=-1)


def _min_p_mask(scaled: mx.array, samplings: list[Sampling]) -> mx.array:
    """Keep tokens at least min_p times as probable as the most likely one, whose scaled logit is 0."""
    min_p = mx.array([sampling.min_p for sampling in samplings])[:, None]
    return scaled >= mx.log(min_p)
