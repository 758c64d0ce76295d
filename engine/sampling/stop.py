"""Decide when a generated text ends, and which of its tokens and bytes are kept. Pure Python.

Stop strings are searched in the bytes, so a stop string may begin in one token and end in another:

    tokens      Hel | lo, w | orld      stop = "lo"
    text_bytes  Hel                     cut before the first occurrence, or after it with `include_stop`
    kept        Hel                     "lo, w" begins at the cut: a token wholly after the cut is dropped

A token that straddles the cut is kept with its logprob, because it was sampled; only `text_bytes` is cut through it. An
end token (the tokenizer's or one of `stop_token_ids`) is kept, and adds its bytes to the text only with `include_stop`.

The first `min_tokens` tokens cannot end the text: end tokens are not sampled there (`min_tokens_banned_ids`), and a
stop string that ends there is ignored.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from scorepool.engine.sequence import Sequence


def check_stop(sequence: Sequence, token_bytes: Callable[[int], bytes], eos_ids: AbstractSet[int]) -> None:
    """Set `finish_reason`, `stop_reason` and `text_bytes` if the token that was appended last ends the text."""
    sampling = sequence.sampling
    if sampling is None:
        raise ValueError("the sequence does not generate")
    may_stop = sequence.num_generated > sampling.min_tokens
    token_id = sequence.token_ids[-1]
    last_bytes = token_bytes(token_id)
    is_eos = token_id in eos_ids and not sampling.ignore_eos
    if may_stop and (is_eos or token_id in sampling.stop_token_ids):
        sequence.finish_reason, sequence.stop_reason = "stop", None if is_eos else token_id
        sequence.text += last_bytes if sampling.include_stop else b""
    else:
        sequence.text += last_bytes
        match = find_stop(sequence.text, sampling.stop, len(last_bytes)) if may_stop else None
        if match is not None:
            start, stop = match
            _cut(sequence, start + len(stop) if sampling.include_stop else start, token_bytes)
            sequence.finish_reason, sequence.stop_reason = "stop", stop
        elif sequence.num_generated >= sampling.max_tokens:
            sequence.finish_reason = "length"
    if sequence.finish_reason is not None:
        sequence.text_bytes = bytes(sequence.text)


def min_tokens_banned_ids(sequence: Sequence, position: int, eos_ids: AbstractSet[int]) -> AbstractSet[int]:
    """Return the end tokens if `position` is within the first `min_tokens` generated tokens, else nothing.

    As in vLLM, the tokenizer's end tokens are banned there even with `ignore_eos`.
    """
    sampling = sequence.sampling
    if sampling is None or not 0 <= position - sequence.num_input_tokens < sampling.min_tokens:
        return frozenset()
    return eos_ids | set(sampling.stop_token_ids)


def find_stop(text: bytes | bytearray, stops: tuple[bytes, ...], num_new_bytes: int) -> tuple[int, bytes] | None:
    """Return start and value of the stop string that begins first, of those that end in the last `num_new_bytes`."""
    matches = []
    for stop in stops:
        search_from = max(0, len(text) - num_new_bytes - len(stop) + 1)
        if (start := text.find(stop, search_from)) >= 0:
            matches.append((start, stop))
    return min(matches, default=None, key=lambda match: match[0])


def _cut(sequence: Sequence, cut: int, token_bytes: Callable[[int], bytes]) -> None:
    """Cut the text at byte `cut`, and drop the tokens wholly after it with their entries in every column."""
    end = 0
    num_kept = 0
    for token_id in sequence.token_ids[sequence.num_input_tokens :]:
        begin, end = end, end + len(token_bytes(token_id))
        if begin >= cut and end > cut:
            break
        num_kept += 1
    num_dropped = sequence.num_generated - num_kept
    del sequence.text[cut:]
    if num_dropped:
        del sequence.token_ids[-num_dropped:]
        sequence.columns.drop_last(num_dropped)
