"""Encode a job's result as Tinker's SampleResponse, which its SDK reads in Protocol Buffers only. Pure."""

import sys
from array import array
from collections.abc import Iterable, Sequence
from math import nan

from scorepool import wire
from scorepool.api.dialects.deltas import columns_from
from scorepool.api.dialects.tinker.protobuf import bytes_field, number_field
from scorepool.api.dialects.tinker.sample import Future
from scorepool.wire.request_fields import MAX_TOP_LOGPROBS

CONTENT_TYPE = "application/x-protobuf"
LENGTH = 1  # the stop reason; that of a stop is 0, the default
NO_LOGPROB = -99_999.0  # in a cell of a matrix that has no token
# Of a job's failure, which is no error of HTTP: the SDK would ask again.
USER, SERVER = "user", "server"
USERS_CODES = frozenset({"invalid", "too_long", "expired", "canceled"})


def to_failure(failure: wire.Failure) -> dict[str, str]:
    """Return the reply to a future whose job has failed."""
    return {"error": failure.message, "category": USER if failure.code in USERS_CODES else SERVER}


def has_shown(future: Future, result: wire.Result) -> bool:
    """True if a result has what the reply shows: the id of a future is a text that any client can write."""
    top = max(future.top_prompt, future.top_sampled)
    return result.num_tokens * top <= MAX_TOP_LOGPROBS and all(
        sequence.logprobs is not None
        and (sequence.num_reported_prompt_tokens or not future.has_prompt_logprobs)
        and (sequence.top_ids is not None or not top or not sequence.token_ids)
        for sequence in result.sequences
    )


def to_reply(future: Future, result: wire.Result) -> bytes:
    """Return the reply to a future whose job has a result."""
    sequences = result.sequences
    reply = b"".join(bytes_field(1, _sampled(sequence, future.top_sampled)) for sequence in sequences)
    if future.has_prompt_logprobs:
        reply += _prompt(future, sequences[0])
    return reply


def _sampled(sequence: wire.SequenceResult, top: int) -> bytes:
    generated = columns_from(sequence, sequence.num_reported_prompt_tokens)
    message = number_field(1, LENGTH if sequence.finish_reason == "length" else 0)
    message += bytes_field(2, _int32(generated.token_ids))
    if generated.logprobs is not None:
        message += bytes_field(3, generated.logprobs.pack())
    if top:
        message += bytes_field(4, _matrix(generated.top_ids or [], generated.top_logprobs or [], top))
    return message


def _prompt(future: Future, sequence: wire.SequenceResult) -> bytes:
    """Encode the prompt's columns, without those of the tokens before the last `last_n`."""
    num_tokens = sequence.num_reported_prompt_tokens
    assert sequence.logprobs is not None
    num_hidden = max(0, num_tokens - future.last_n) if future.last_n else 0
    logprobs = wire.Floats([nan] * num_hidden)
    logprobs.extend(sequence.logprobs[num_hidden:num_tokens])
    message = bytes_field(2, logprobs.pack())
    if future.top_prompt:
        ids: list[list[int]] = [[]] * num_hidden + (sequence.top_ids or [])[num_hidden:num_tokens]
        values = [wire.Floats()] * num_hidden + (sequence.top_logprobs or [])[num_hidden:num_tokens]
        message += bytes_field(3, _matrix(ids, values, future.top_prompt))
    return message


def _matrix(ids: Sequence[Sequence[int]], logprobs: Sequence[wire.Floats], top: int) -> bytes:
    """Encode the `top` most likely tokens of each row, filled up with cells that have none."""
    all_ids = array("i")
    values = wire.Floats()
    for row_ids, row in zip(ids, logprobs, strict=True):
        num_empty = top - len(row_ids[:top])
        all_ids.extend([*row_ids[:top], *[0] * num_empty])
        values.extend([*row[:top], *[NO_LOGPROB] * num_empty])
    message = bytes_field(1, _int32(all_ids)) + bytes_field(2, values.pack())
    return message + number_field(3, top) + number_field(4, len(ids))


def _int32(numbers: Iterable[int]) -> bytes:
    packed = array("i", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
