"""The next token of each row. Pure: the same logits, Sampling and seeds give the same tokens in any batch.

Every row has noise of its own, keyed by its seed and the index of the token, so a seed's tokens do not depend
on the batch. A token is drawn as argmax(logits / temperature + Gumbel noise), which is a draw from the
softmax.
"""

from hashlib import blake2b

import mlx.core as mx

from scorepool.engine.sampling import scoring
from scorepool.engine.sequence import Sampling

COLDEST = 1e-30  # below it float32 ends, and the likeliest token is long since the only one


def noise_key(seed: int, index: int) -> int:
    """The noise's key for the generated token number `index` of a row; neighbouring seeds share nothing."""
    packed = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


def sample(logits: mx.array, samplings: list[Sampling], keys: list[int]) -> tuple[mx.array, mx.array]:
    """Token ids [rows] int32 and their logprobs [rows] under the distribution sampled from: 0 for a greedy row.

    logits [rows, vocab] float32; one Sampling and one noise key a row. A row with NaN gives a token, and NaN
    unless it is greedy.
    """
    rows = [row for row, sampling in enumerate(samplings) if sampling.temperature]
    if len(rows) == len(samplings):
        return _draw(logits, samplings, keys)
    token_ids, logprobs = mx.argmax(logits, axis=-1).astype(mx.int32), mx.zeros(logits.shape[0])
    if rows:
        index = mx.array(rows)
        drawn = _draw(logits[index], [samplings[row] for row in rows], [keys[row] for row in rows])
        token_ids[index], logprobs[index] = drawn
    return token_ids, logprobs


def _draw(logits: mx.array, samplings: list[Sampling], keys: list[int]) -> tuple[mx.array, mx.array]:
    temperature = mx.array([max(sampling.temperature, COLDEST) for sampling in samplings])[:, None]
    # The largest becomes 0 before the division, so that no temperature overflows.
    scaled = _filter((logits - logits.max(axis=-1, keepdims=True)) / temperature, samplings)
    noise = mx.stack([mx.random.gumbel(logits.shape[-1:], key=mx.random.key(key)) for key in keys])
    token_ids = mx.argmax(scaled + noise, axis=-1).astype(mx.int32)
    chosen = mx.take_along_axis(scaled, token_ids[:, None], axis=-1)[:, 0]
    return token_ids, chosen - scoring.log_normalizer(scaled)


def _filter(scaled: mx.array, samplings: list[Sampling]) -> mx.array:
    """-inf where top-k, top-p or min-p excludes a token; only rows that have such a filter are touched."""
    for chosen, keep in ((_is_sorted, _keep_first), (_has_min_p, _keep_near)):
        rows = [row for row, sampling in enumerate(samplings) if chosen(sampling)]
        if rows:
            index = mx.array(rows)
            part = scaled[index]
            kept = keep(part, [samplings[row] for row in rows])
            scaled[index] = mx.where(kept, part, -mx.inf)
    return scaled


def _is_sorted(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1


def _has_min_p(sampling: Sampling) -> bool:
    return sampling.min_p > 0


def _keep_first(scaled: mx.array, samplings: list[Sampling]) -> mx.array:
    """By falling probability, equal ones by id: the first top_k, and those before which less than top_p lies."""
    vocab_size = scaled.shape[-1]
    order = mx.argsort(-scaled, axis=-1)
    falling = mx.softmax(mx.take_along_axis(scaled, order, axis=-1), axis=-1, precise=True)
    before = mx.cumsum(falling, axis=-1, inclusive=False)
    top_k = mx.array([min(sampling.top_k or vocab_size, vocab_size) for sampling in samplings])[:, None]
    top_p = mx.array([sampling.top_p if sampling.top_p < 1 else mx.inf for sampling in samplings])[:, None]
    place = mx.arange(vocab_size)[None]
    kept = (place < top_k) & ((before < top_p) | (place == 0))  # the first too where top_p is 0 in float32
    return mx.put_along_axis(mx.zeros(kept.shape, mx.bool_), order, kept, axis=-1)


def _keep_near(scaled: mx.array, samplings: list[Sampling]) -> mx.array:
    """At least min_p times as probable as the likeliest, whose scaled logit is 0."""
    min_p = mx.array([sampling.min_p for sampling in samplings])[:, None]
    return scaled >= mx.log(min_p)
