"""When a generated text ends, and what of it is kept. Pure Python.

Stop strings are looked for in the bytes, so a stop string may begin in one token and end in another:

    tokens      Hel | lo, w | orld      stop = "lo"
    text_bytes  Hel                     cut before the first occurrence
    kept        Hel                     "lo, w" begins at the cut: a token wholly behind it is dropped

A token that straddles the cut is kept with its logprob, for it was sampled; `text_bytes` alone is cut through
it. An end-of-sequence token ends the text, stays in the columns and adds no bytes.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from engine.sequence import Sequence


def end_if_done(sequence: Sequence, token_bytes: Callable[[int], bytes], eos_ids: AbstractSet[int]) -> None:
    """Look at the token that was appended last: set `finish_reason` and `text_bytes` if it is the end."""
    sampling = sequence.sampling
    if sampling is None:
        raise ValueError("the row does not generate")
    token_id = sequence.token_ids[-1]
    if token_id in eos_ids:
        sequence.finish_reason = "stop"
    else:
        piece = token_bytes(token_id)
        sequence.text += piece
        cut = first_stop(sequence.text, sampling.stop, len(piece))
        if cut is not None:
            _cut(sequence, cut, token_bytes)
            sequence.finish_reason = "stop"
        elif sequence.num_generated >= sampling.max_tokens:
            sequence.finish_reason = "length"
    if sequence.finish_reason is not None:
        sequence.text_bytes = bytes(sequence.text)


def first_stop(text: bytes | bytearray, stops: tuple[bytes, ...], num_new_bytes: int) -> int | None:
    """Where the first of `stops` begins in `text`, if one ends among the last `num_new_bytes`."""
    found = []
    for stop in stops:
        start = max(0, len(text) - num_new_bytes - len(stop) + 1)
        if (at := text.find(stop, start)) >= 0:
            found.append(at)
    return min(found, default=None)


def _cut(sequence: Sequence, cut: int, token_bytes: Callable[[int], bytes]) -> None:
    """Drop the tokens wholly behind the cut, with their entries in every column."""
    end = 0
    num_kept = 0
    for token_id in sequence.token_ids[sequence.num_given :]:
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
