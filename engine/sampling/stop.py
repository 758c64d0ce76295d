"""When a generated text ends, and what of it is kept. Pure Python.

Stop strings are looked for in the bytes, so a stop string may begin in one token and end in another:

    tokens      Hel | lo, w | orld      stop = "lo"
    text_bytes  Hel                     cut before the first occurrence, or, with `include_stop`, behind it
    kept        Hel                     "lo, w" begins at the cut: a token wholly behind it is dropped

A token that straddles the cut is kept with its logprob, for it was sampled; `text_bytes` alone is cut through
it. A token that ends the text, the tokenizer's or one of the caller's, stays in the columns and adds no bytes, but with
`include_stop`.

The first `min_tokens` tokens end nothing: the tokens that would are not sampled there (`barred_ids`), and a stop
string that ends in them is not seen.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from scorepool.engine.sequence import Sequence


def check_stop(sequence: Sequence, token_bytes: Callable[[int], bytes], eos_ids: AbstractSet[int]) -> None:
    """Look at the token that was appended last: set `finish_reason` and `text_bytes` if it is the end."""
    sampling = sequence.sampling
    if sampling is None:
        raise ValueError("the row does not generate")
    may_stop = sequence.num_generated > sampling.min_tokens
    token_id = sequence.token_ids[-1]
    piece = token_bytes(token_id)
    is_eos = token_id in eos_ids and not sampling.ignore_eos
    if may_stop and (is_eos or token_id in sampling.stop_token_ids):
        sequence.finish_reason, sequence.stop_reason = "stop", None if is_eos else token_id
        sequence.text += piece if sampling.include_stop else b""
    else:
        sequence.text += piece
        found = first_stop(sequence.text, sampling.stop, len(piece)) if may_stop else None
        if found is not None:
            at, stop = found
            _cut(sequence, at + len(stop) if sampling.include_stop else at, token_bytes)
            sequence.finish_reason, sequence.stop_reason = "stop", stop
        elif sequence.num_generated >= sampling.max_tokens:
            sequence.finish_reason = "length"
    if sequence.finish_reason is not None:
        sequence.text_bytes = bytes(sequence.text)


def min_tokens_banned_ids(sequence: Sequence, position: int, eos_ids: AbstractSet[int]) -> AbstractSet[int]:
    """Tokens that may not be sampled at `position`: it is too early for the end, and these mean it.

    The tokenizer's are among them where they are ignored too, as in vLLM.
    """
    sampling = sequence.sampling
    if sampling is None or not 0 <= position - sequence.num_input_tokens < sampling.min_tokens:
        return frozenset()
    return eos_ids | set(sampling.stop_token_ids)


def first_stop(text: bytes | bytearray, stops: tuple[bytes, ...], num_new_bytes: int) -> tuple[int, bytes] | None:
    """Where the first of `stops` begins in `text`, and which it is, if one ends among the last `num_new_bytes`."""
    found = []
    for stop in stops:
        start = max(0, len(text) - num_new_bytes - len(stop) + 1)
        if (at := text.find(stop, start)) >= 0:
            found.append((at, stop))
    return min(found, default=None, key=lambda found: found[0])


def _cut(sequence: Sequence, cut: int, token_bytes: Callable[[int], bytes]) -> None:
    """Drop the tokens wholly behind the cut, with their entries in every column."""
    end = 0
    num_kept = 0
    for token_id in sequence.token_ids[sequence.num_input_tokens :]:
        begin, end = end, end + len(token_bytes(token_id))
        if begin >= cut and end > cut:
            break
        num_kept += 1
    num_dropped = sequence.num_generated - num_kept
    del sequence.text[cut:]
    for column in (
        sequence.token_ids,
        sequence.logprobs,
        sequence.top_ids,
        sequence.top_values,
        sequence.ranks,
        sequence.entropies,
        sequence.sampled_logprobs,
    ):
        if num_dropped and column:  # an empty column was not asked for
            del column[-num_dropped:]
