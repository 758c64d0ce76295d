"""TRL's `/get_sequence_logprobs/`: what a trainer that distils asks its teacher, as `trl vllm-serve` answers it. Pure.

Position t of a sequence belongs to its token t, given those before it. Told are the positions from the prompt's length
on; that of a first token has no logprob.
"""

import sys
from array import array
from collections.abc import Sequence
from math import inf, isnan
from typing import Annotated, Literal

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.wire.request import ModelName, TokenIds, TopLogprobs


class SequenceLogprobsRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`sequences` are prompts with their completions. `model` is ours, for a server of several."""

    sequences: Annotated[list[TokenIds], Meta(min_length=1)]
    prompt_lengths: list[Annotated[int, Meta(ge=0)]]
    top_logprobs: TopLogprobs = 100
    temperature: Annotated[float, Meta(ge=1e-9, le=100, description="Divides the logits before the softmax.")] = 1.0
    response_format: Literal["json", "binary"] = "json"
    model: ModelName | None = None

    @property
    def completion_lengths(self) -> list[int]:
        return [len(sequence) - length for sequence, length in zip(self.sequences, self.prompt_lengths, strict=True)]

    @property
    def shape(self) -> list[int]:
        """Of the arrays of a binary reply: sequences, longest completion, likeliest tokens."""
        return [len(self.sequences), max(self.completion_lengths), self.top_logprobs]


class SequenceLogprobs(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """In JSON the first two: by sequence and position the likeliest tokens, likeliest first, and after them the actual
    one where it is not among them; nothing at a first token.

    In the binary form the others: little-endian arrays in base64, float32 padded with -inf and int32 padded with 0.

        logprobs, token_ids                 `shape`: sequences, longest completion, top_logprobs
        actual_logprobs, actual_token_ids   the same, but for a last dimension of 1
    """

    logprobs: list[list[list[float | None]]] | None = None
    logprob_token_ids: list[list[list[int]]] | None = None
    logprobs_b64: bytes | None = None
    token_ids_b64: bytes | None = None
    actual_logprobs_b64: bytes | None = None
    actual_token_ids_b64: bytes | None = None
    shape: list[int] | None = None
    completion_lengths: list[int] | None = None


def check(body: SequenceLogprobsRequest, card: wire.ServedModel) -> None:
    """What does not fit together, and what no worker of the model can run. Raises wire.Invalid."""
    num = len(body.sequences)
    if len(body.prompt_lengths) != num:
        raise _invalid("prompt_lengths", f"{num}, one for each of the sequences", len(body.prompt_lengths))
    for index, (sequence, length) in enumerate(zip(body.sequences, body.prompt_lengths, strict=True)):
        if length > len(sequence):
            raise _invalid(f"prompt_lengths[{index}]", f"at most {len(sequence)}, the sequence's length", length)
        if len(sequence) > card.context_length:
            expected = f"at most {card.context_length} token ids, the model's context"
            raise _invalid(f"sequences[{index}]", expected, len(sequence))
        if max(sequence) >= card.vocab_size:
            place = next(place for place, id_ in enumerate(sequence) if id_ >= card.vocab_size)
            raise _invalid(f"sequences[{index}][{place}]", f"a token id below {card.vocab_size}", sequence[place])


def _invalid(field: str, expected: str, found: int) -> wire.Invalid:
    return wire.Invalid(f"{field}: expected {expected}, found {found}", field)


def to_scores(body: SequenceLogprobsRequest, model: str, timeout_s: int) -> list[wire.Score]:
    """One a sequence of which anything has a logprob, so that the workers of a model share them."""
    return [
        wire.Score(
            model=model,
            timeout_s=timeout_s,
            items=[wire.ScoreItem(prompt=sequence[: length or 1], completion=sequence[length or 1 :])],
            score="completion" if length else "all",  # then from the first token on, which is null
            top_logprobs=body.top_logprobs,
            temperature=body.temperature,
        )
        for sequence, length in zip(body.sequences, body.prompt_lengths, strict=True)
        if _is_scored(sequence, length)
    ]


def _is_scored(sequence: list[int], length: int) -> bool:
    return len(sequence) > max(length, 1)


def _scored(body: SequenceLogprobsRequest, results: Sequence[wire.Result]) -> list[wire.SequenceResult | None]:
    """Of each sequence; None where it was not scored."""
    found = iter(results)
    lengths = zip(body.sequences, body.prompt_lengths, strict=True)
    return [next(found).sequences[0] if _is_scored(*one) else None for one in lengths]


def to_lists(body: SequenceLogprobsRequest, results: Sequence[wire.Result]) -> SequenceLogprobs:
    told: list[list[tuple[list[int], list[float | None]]]] = [
        [([], [])] * length if scored is None else [_told(scored, entry) for entry in range(length)]
        for scored, length in zip(_scored(body, results), body.completion_lengths, strict=True)
    ]
    return SequenceLogprobs(
        logprobs=[[values for _, values in row] for row in told],
        logprob_token_ids=[[ids for ids, _ in row] for row in told],
    )


def _told(scored: wire.SequenceResult, entry: int) -> tuple[list[int], list[float | None]]:
    """The likeliest tokens, and the actual one where it is not among them; nothing where there is no logprob."""
    ids, tops = _top(scored, entry)
    actual, logprob = _actual(scored, entry)
    if logprob is None or actual in ids:
        return ids, tops.values()
    return [*ids, actual], [*tops, logprob]


def _actual(scored: wire.SequenceResult, entry: int) -> tuple[int, float | None]:
    assert scored.logprobs is not None
    logprob = scored.logprobs[entry]
    return scored.token_ids[entry], None if isnan(logprob) else logprob


def _top(scored: wire.SequenceResult, entry: int) -> tuple[list[int], wire.Floats]:
    if scored.top_ids is None or scored.top_logprobs is None:  # none were asked for
        return [], wire.Floats()
    return scored.top_ids[entry], scored.top_logprobs[entry]


def to_arrays(body: SequenceLogprobsRequest, results: Sequence[wire.Result]) -> SequenceLogprobs:
    num, longest, k = body.shape
    logprobs, token_ids = array("f", [-inf]) * (num * longest * k), array("i", [0]) * (num * longest * k)
    actual_logprobs, actual_ids = array("f", [-inf]) * (num * longest), array("i", [0]) * (num * longest)
    for row, scored in enumerate(_scored(body, results)):
        if scored is None:
            continue
        for entry in range(len(scored.token_ids)):
            place = row * longest + entry
            ids, tops = _top(scored, entry)
            token_ids[place * k : place * k + len(ids)] = array("i", ids)
            logprobs[place * k : place * k + len(ids)] = tops
            actual, logprob = _actual(scored, entry)
            if logprob is not None:
                actual_ids[place], actual_logprobs[place] = actual, logprob
    return SequenceLogprobs(
        logprobs_b64=_packed(logprobs),
        token_ids_b64=_packed(token_ids),
        actual_logprobs_b64=_packed(actual_logprobs),
        actual_token_ids_b64=_packed(actual_ids),
        shape=body.shape,
        completion_lengths=body.completion_lengths,
    )


def _packed(column: "array[int] | array[float]") -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()
