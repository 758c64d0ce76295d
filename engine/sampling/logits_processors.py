"""What a caller adds to the logits that a token is sampled from: biases of single tokens, penalties of repeated ones,
and which tokens are not sampled at all.

Pure. Sampling alone sees these logits; every reported logprob is of the model's own.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import mlx.core as mx

from scorepool.engine.sequence import Sampling


def apply_penalties(logits: mx.array, sampling: Sampling, given: list[int], generated: mx.array) -> mx.array:
    """[vocab], from logits [vocab] float32 and the row's token ids so far; `generated` [n] may be on its way.

    As vLLM: the repetition penalty knows the given tokens, the two others only those that were generated.
    """
    if sampling.repetition_penalty != 1:
        seen = mx.concatenate([mx.array(given, dtype=mx.int32), generated])
        penalty = sampling.repetition_penalty
        penalized = mx.where(logits > 0, logits / penalty, logits * penalty)
        logits = mx.where(_is_in(seen, logits), penalized, logits)
    if sampling.presence_penalty and generated.size:
        logits = mx.where(_is_in(generated, logits), logits - sampling.presence_penalty, logits)
    if sampling.frequency_penalty and generated.size:
        logits = logits.at[generated].add(-sampling.frequency_penalty)  # once for each time a token is there
    if sampling.logit_bias:
        token_ids, biases = zip(*sampling.logit_bias, strict=True)
        logits = logits.at[mx.array(token_ids)].add(mx.array(biases))
    return logits


def mask_banned(logits: mx.array, barred: Sequence[AbstractSet[int]]) -> mx.array:
    """[rows, vocab]: -inf at each row's barred ids; the very `logits` where no row has any."""
    vocab_size = logits.shape[-1]  # a configuration may name an end token that the model has not
    places = [(row, token_id) for row, ids in enumerate(barred) for token_id in ids if token_id < vocab_size]
    if not places:
        return logits
    rows, token_ids = zip(*places, strict=True)
    return logits.at[mx.array(rows), mx.array(token_ids)].minimum(-mx.inf)


def apply_grammar_bitmask(logits: mx.array, allowed: bytes) -> mx.array:
    """[vocab]: -inf where the bit of a token is not set; `allowed` has the lowest id's first."""
    words = mx.array(memoryview(allowed).cast("I"))  # type: ignore[arg-type] # any buffer
    bits = ((words[:, None] >> mx.arange(32, dtype=mx.uint32)) & 1).astype(mx.bool_).reshape(-1)[: logits.shape[0]]
    bits = mx.concatenate([bits, mx.zeros(logits.shape[0] - bits.shape[0], mx.bool_)])  # the vocabulary may be shorter
    return mx.where(bits, logits, -mx.inf)


def _is_in(token_ids: mx.array, logits: mx.array) -> mx.array:
    """[vocab] bool."""
    return mx.put_along_axis(mx.zeros(logits.shape, mx.bool_), token_ids, mx.array(True), axis=0)
