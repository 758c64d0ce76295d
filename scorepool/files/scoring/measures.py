"""Compute the columns that a result adds to its row. Pure."""

import math
from collections.abc import Sequence
from typing import TypeVar

from scorepool import wire
from scorepool.files.rows import Values

T = TypeVar("T")
SCORE_COLUMNS = (
    "logprob_sum",
    "num_tokens",
    "perplexity",
    "bits_per_byte",
    "logprob_per_token",
    "logprob_per_byte",
    "is_greedy",
)
GENERATE_COLUMNS = ("generated_text", "finish_reason", "logprob_sum", "num_tokens", "perplexity", "logprob_per_token")
TOKEN_COLUMNS = ("token_ids", "tokens", "logprobs")
RANKS = "ranks"
BITS_PER_NAT = 1 / math.log(2)


def score_columns(sequence: wire.SequenceResult, with_tokens: bool, text: str | None = None) -> Values:
    """Return SCORE_COLUMNS of the completion, and its per-token columns if they are asked for.

    Logprobs are natural; bits_per_byte is base 2. Bytes are those of the tokens that were scored. `text` is as in
    `scored`.
    """
    pairs = scored(sequence, text)
    logprobs, num_bytes = [logprob for logprob, _ in pairs], sum(len(each) for _, each in pairs)
    logprob_sum = math.fsum(logprobs)
    ranks = _of_completion(sequence.ranks, sequence)
    columns = {
        **_sums(logprobs),
        "bits_per_byte": _ratio(-logprob_sum * BITS_PER_NAT, num_bytes),
        "logprob_per_byte": _ratio(logprob_sum, num_bytes),
        "is_greedy": all(rank == 1 for rank in ranks if rank is not None) if logprobs and ranks else None,
    }
    ordered = {name: columns[name] for name in SCORE_COLUMNS}
    return ordered | (_token_columns(sequence) | {RANKS: ranks} if with_tokens else {})


def is_scored_whole(sequence: wire.SequenceResult) -> bool:
    """True if every token of the completion has a logprob."""
    return len(scored(sequence)) == len(sequence.token_ids) - sequence.num_reported_prompt_tokens


def generate_columns(sequence: wire.SequenceResult, with_tokens: bool) -> Values:
    """Return GENERATE_COLUMNS of the generated tokens, and their per-token columns if they are asked for."""
    columns = {
        "generated_text": sequence.text,
        "finish_reason": sequence.finish_reason,
        **_sums([logprob for logprob, _ in scored(sequence)]),
    }
    ordered = {name: columns[name] for name in GENERATE_COLUMNS}
    return ordered | (_token_columns(sequence) if with_tokens else {})


def scored(sequence: wire.SequenceResult, text: str | None = None) -> list[tuple[float, bytes]]:
    """Return the logprob and the bytes of each of the completion's tokens that has a logprob.

    The first token of a text has none if the model's texts begin without BOS. `text` is that of the completion if
    nothing but BOS comes before it: the space that sentencepiece puts before a text is none of its bytes.
    """
    logprobs = _of_completion(sequence.logprobs, sequence)
    token_bytes = _of_completion(sequence.token_bytes, sequence)
    if text is not None and token_bytes and token_bytes[0].startswith(b" ") and not text.startswith(" "):
        token_bytes[0] = token_bytes[0][1:]
    return [pair for pair in zip(logprobs, token_bytes, strict=True) if not math.isnan(pair[0])]


def _sums(logprobs: list[float]) -> Values:
    logprob_sum = math.fsum(logprobs)
    per_token = _ratio(logprob_sum, len(logprobs))
    return {
        "logprob_sum": logprob_sum if logprobs else None,
        "num_tokens": len(logprobs),
        "perplexity": None if per_token is None else exp(-per_token),
        "logprob_per_token": per_token,
    }


def _token_columns(sequence: wire.SequenceResult) -> Values:
    """Return TOKEN_COLUMNS of the completion. Bytes that are not UTF-8 by themselves become U+FFFD in `tokens`."""
    logprobs = _of_completion(sequence.logprobs, sequence)
    return {
        "token_ids": _of_completion(sequence.token_ids, sequence),
        "tokens": [each.decode("utf-8", "replace") for each in _of_completion(sequence.token_bytes, sequence)],
        "logprobs": [None if math.isnan(logprob) else logprob for logprob in logprobs],
    }


def _of_completion(column: Sequence[T] | None, sequence: wire.SequenceResult) -> list[T]:
    return list((column or ())[sequence.num_reported_prompt_tokens :])


def _ratio(total: float, number: int) -> float | None:
    return total / number if number else None


def exp(value: float) -> float:
    """Return e to the power of a value, inf if that is too large for a float."""
    try:
        return math.exp(value)
    except OverflowError:  # of logprobs that were -inf
        return math.inf
