"""Change the logits that a token is sampled from: biases, penalties for repeated tokens, bad words, banned tokens.

Pure functions. Only sampling sees the changed logits; every reported logprob comes from the model's own.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import mlx.core as mx

from scorepool.engine.sequence import Sampling


def apply_penalties(logits: mx.array, sampling: Sampling, input_ids: list[int], generated_ids: mx.array) -> mx.array:
    """Add biases and penalties to one row's logits [vocab] float32; `generated_ids` [n] may be lazy.

    As in vLLM, the repetition penalty counts input and generated tokens, the two others only generated ones.
    """
    if sampling.repetition_penalty != 1:
        seen = mx.concatenate([mx.array(input_ids, dtype=mx.int32), generated_ids])
        penalty = sampling.repetition_penalty
        penalized = mx.where(logits > 0, logits / penalty, logits * penalty)
        logits = mx.where(_is_in(seen, logits), penalized, logits)
    if sampling.presence_penalty and generated_ids.size:
        logits = mx.where(_is_in(generated_ids, logits), logits - sampling.presence_penalty, logits)
    if sampling.frequency_penalty and generated_ids.size:
        logits = logits.at[generated_ids].add(-sampling.frequency_penalty)  # once per occurrence
    if sampling.logit_bias:
        token_ids, biases = zip(*sampling.logit_bias, strict=True)
        logits = logits.at[mx.array(token_ids)].add(mx.array(biases))
    return logits


def mask_banned(logits: mx.array, banned_ids: Sequence[AbstractSet[int]]) -> mx.array:
    """Set each row's banned ids to -inf in logits [rows, vocab]; return `logits` itself if no row has any."""
    vocab_size = logits.shape[-1]  # a configuration may name an end token that is not in the vocabulary
    banned = [(row, token_id) for row, ids in enumerate(banned_ids) for token_id in ids if 0 <= token_id < vocab_size]
    if not banned:
        return logits
    rows, token_ids = zip(*banned, strict=True)
    return logits.at[mx.array(rows), mx.array(token_ids)].minimum(-mx.inf)


def mask_bad_words(
    logits: mx.array, words: Sequence[tuple[int, ...]], read_ids: list[int], last_id: mx.array | None
) -> mx.array:
    """Set logits [vocab] to -inf at the last token of each word whose other tokens are the last generated ones.

    The generated tokens are `read_ids`, and then `last_id` [1], which may be lazy.
    """
    banned: list[int] = []
    after_last: list[tuple[int, int]] = []  # (token before, banned token): decided by `last_id`
    for *prefix, token_id in words:
        known = prefix[:-1] if last_id is not None else prefix
        if known and read_ids[-len(known) :] != known:
            continue
        if last_id is not None and prefix:
            after_last.append((prefix[-1], token_id))
        else:
            banned.append(token_id)
    if banned:
        logits = logits.at[mx.array(banned)].minimum(-mx.inf)
    if after_last:
        before, token_ids = zip(*after_last, strict=True)
        logits = logits.at[mx.array(token_ids)].minimum(mx.where(mx.array(before) == last_id, -mx.inf, mx.inf))
    return logits


def apply_token_bitmask(logits: mx.array, bitmask: bytes) -> mx.array:
    """Set logits [vocab] to -inf where the token's bit is 0. The lowest bit of the first byte belongs to token 0."""
    words = mx.array(memoryview(bitmask).cast("I"))  # type: ignore[arg-type] # any buffer
    bits = ((words[:, None] >> mx.arange(32, dtype=mx.uint32)) & 1).astype(mx.bool_).reshape(-1)[: logits.shape[0]]
    # The mask may be shorter than the logits.
    bits = mx.concatenate([bits, mx.zeros(logits.shape[0] - bits.shape[0], mx.bool_)])
    return mx.where(bits, logits, -mx.inf)


def _is_in(token_ids: mx.array, logits: mx.array) -> mx.array:
    """Return [vocab] bool: True at `token_ids`."""
    return mx.put_along_axis(mx.zeros(logits.shape, mx.bool_), token_ids, mx.array(True), axis=0)
