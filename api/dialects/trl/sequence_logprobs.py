"""Translate TRL's `/get_sequence_logprobs/`: a teacher's logprobs for distillation, as `trl vllm-serve` has them. Pure.

Position t of a sequence belongs to its token t, given the tokens before it. The reply holds the positions from the
prompt's length on. The first token of a sequence has no logprob.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from math import inf, isnan
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects.protocol import Context, Endpoint, JobCount, ReplyTooLarge
from scorepool.wire.request_fields import MAX_LIST_LENGTH, ModelName, ScoreTemperature, TokenIds, TopK

MAX_ENTRIES = 2**24  # of the padded arrays of one reply: 128 MiB of logprobs and ids


class SequenceLogprobsRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Score given sequences."""

    sequences: Annotated[
        list[TokenIds], Meta(min_length=1, max_length=MAX_LIST_LENGTH, description="Prompts with their completions.")
    ]
    prompt_lengths: Annotated[
        list[Annotated[int, Meta(ge=0, le=2**31 - 1)]],
        Meta(max_length=MAX_LIST_LENGTH, description="Number of tokens of each sequence that are prompt."),
    ]
    top_logprobs: TopK = 100
    temperature: ScoreTemperature = 1.0
    response_format: Literal["json", "binary"] = "json"
    model: Annotated[ModelName | None, Meta(description="An addition. Needed if several models are served.")] = None

    @property
    def completion_lengths(self) -> list[int]:
        """Return the number of tokens of each completion."""
        return [len(sequence) - length for sequence, length in zip(self.sequences, self.prompt_lengths, strict=True)]

    @property
    def shape(self) -> list[int]:
        """Return the shape of the arrays of a binary reply: sequences, longest completion, top logprobs."""
        return [len(self.sequences), max(self.completion_lengths), self.top_logprobs]


class SequenceLogprobs(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Report the most likely tokens and the actual token at each position of the completions.

    `json` has the first two fields: by sequence and position the most likely tokens, most likely first, and after them
    the actual token if it is not among them. The first token of a sequence has an empty list.

    `binary` has the others: little-endian arrays in base64, float32 padded with -inf and int32 padded with 0.

        logprobs, token_ids                 `shape`: sequences, longest completion, top_logprobs
        actual_logprobs, actual_token_ids   the same with a last dimension of 1
    """

    logprobs: list[list[list[float | None]]] | None = None
    logprob_token_ids: list[list[list[int]]] | None = None
    logprobs_b64: bytes | None = None
    token_ids_b64: bytes | None = None
    actual_logprobs_b64: bytes | None = None
    actual_token_ids_b64: bytes | None = None
    shape: list[int] | None = None
    completion_lengths: list[int] | None = None


def check(body: SequenceLogprobsRequest, model: wire.ServedModel) -> None:
    """Check that the lists fit together and that a worker of the model can run them; raise wire.Invalid."""
    num = len(body.sequences)
    if len(body.prompt_lengths) != num:
        raise _invalid("prompt_lengths", f"{num}, one for each of the sequences", len(body.prompt_lengths))
    for index, (sequence, length) in enumerate(zip(body.sequences, body.prompt_lengths, strict=True)):
        if length > len(sequence):
            raise _invalid(f"prompt_lengths[{index}]", f"at most {len(sequence)}, the sequence's length", length)
        if len(sequence) > model.context_length:
            expected = f"at most {model.context_length} token ids, the model's context"
            raise _invalid(f"sequences[{index}]", expected, len(sequence))
        if max(sequence) >= model.vocab_size:
            position = next(position for position, token_id in enumerate(sequence) if token_id >= model.vocab_size)
            field = f"sequences[{index}][{position}]"
            raise _invalid(field, f"a token id below {model.vocab_size}", sequence[position])


def _invalid(field: str, expected: str, found: int) -> wire.Invalid:
    return wire.Invalid(f"{field}: expected {expected}, found {found}", field)


def to_scores(body: SequenceLogprobsRequest, model: str, timeout_s: int) -> Iterator[wire.Score]:
    """Build one request per sequence that has a logprob to report, so that the workers of a model share them."""
    for sequence, length in zip(body.sequences, body.prompt_lengths, strict=True):
        if not _is_scored(sequence, length):
            continue
        yield wire.Score(
            model=model,
            timeout_s=timeout_s,
            items=[wire.ScoreItem(prompt=sequence[: length or 1], completion=sequence[length or 1 :])],
            score="completion" if length else "all",  # `all` begins with the first token, whose logprob is null
            top_logprobs=body.top_logprobs,
            temperature=body.temperature,
        )


def _is_scored(sequence: list[int], prompt_length: int) -> bool:
    """True if the sequence has a logprob to report: its first token has none."""
    return len(sequence) > max(prompt_length, 1)


def _by_sequence(body: SequenceLogprobsRequest, results: Sequence[wire.Result]) -> list[wire.SequenceResult | None]:
    """Return the result of each sequence, None if it was not scored."""
    remaining = iter(results)
    pairs = zip(body.sequences, body.prompt_lengths, strict=True)
    return [next(remaining).sequences[0] if _is_scored(*pair) else None for pair in pairs]


def to_lists(body: SequenceLogprobsRequest, results: Sequence[wire.Result]) -> SequenceLogprobs:
    """Build the reply of `json`."""
    positions: list[list[tuple[list[int], list[float | None]]]] = [
        [([], [])] * length if scored is None else [_position(scored, entry) for entry in range(length)]
        for scored, length in zip(_by_sequence(body, results), body.completion_lengths, strict=True)
    ]
    return SequenceLogprobs(
        logprobs=[[logprobs for _, logprobs in of_sequence] for of_sequence in positions],
        logprob_token_ids=[[token_ids for token_ids, _ in of_sequence] for of_sequence in positions],
    )


def _position(scored: wire.SequenceResult, entry: int) -> tuple[list[int], list[float | None]]:
    """Return the most likely tokens and the actual one. Both lists are empty if the entry has no logprob."""
    top_ids, top_logprobs = _top(scored, entry)
    token_id, logprob = _actual(scored, entry)
    if logprob is None or token_id in top_ids:
        return top_ids, top_logprobs.values()
    return [*top_ids, token_id], [*top_logprobs, logprob]


def _actual(scored: wire.SequenceResult, entry: int) -> tuple[int, float | None]:
    assert scored.logprobs is not None
    logprob = scored.logprobs[entry]
    return scored.token_ids[entry], None if isnan(logprob) else logprob


def _top(scored: wire.SequenceResult, entry: int) -> tuple[list[int], wire.Floats]:
    if scored.top_ids is None or scored.top_logprobs is None:  # none were asked for
        return [], wire.Floats()
    return scored.top_ids[entry], scored.top_logprobs[entry]


def to_arrays(body: SequenceLogprobsRequest, results: Sequence[wire.Result]) -> SequenceLogprobs:
    """Build the reply of `binary`."""
    num, longest, k = body.shape
    logprobs, token_ids = array("f", [-inf]) * (num * longest * k), array("i", [0]) * (num * longest * k)
    actual_logprobs, actual_ids = array("f", [-inf]) * (num * longest), array("i", [0]) * (num * longest)
    for number, scored in enumerate(_by_sequence(body, results)):
        if scored is None:
            continue
        for entry in range(len(scored.token_ids)):
            position = number * longest + entry
            top_ids, top_logprobs = _top(scored, entry)
            token_ids[position * k : position * k + len(top_ids)] = array("i", top_ids)
            logprobs[position * k : position * k + len(top_ids)] = top_logprobs
            token_id, logprob = _actual(scored, entry)
            if logprob is not None:
                actual_ids[position], actual_logprobs[position] = token_id, logprob
    return SequenceLogprobs(
        logprobs_b64=_pack(logprobs),
        token_ids_b64=_pack(token_ids),
        actual_logprobs_b64=_pack(actual_logprobs),
        actual_token_ids_b64=_pack(actual_ids),
        shape=body.shape,
        completion_lengths=body.completion_lengths,
    )


def _pack(column: "array[int] | array[float]") -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


class SequenceLogprobsEndpoint(Endpoint[SequenceLogprobsRequest]):
    name = "get_sequence_logprobs"
    path = "/get_sequence_logprobs/"
    summary = "Logprobs of given sequences"
    description = "Each sequence is a job, so the workers of the model share them. `temperature` divides the logits."
    example: ClassVar = {"sequences": [[1, 2, 3]], "prompt_lengths": [1]}
    body_type = SequenceLogprobsRequest
    reply_type = SequenceLogprobs
    has_large_replies = True

    def job_count(self, body: SequenceLogprobsRequest) -> JobCount:
        return JobCount(len(body.sequences), "sequences", "sequences")

    def to_requests(self, body: SequenceLogprobsRequest, context: Context) -> Iterable[wire.Request]:
        assert context.served_model is not None
        check(body, context.served_model)
        num, longest, k = body.shape
        if body.response_format == "binary" and num * longest * max(k, 1) > MAX_ENTRIES:
            raise ReplyTooLarge(
                f"sequences: {num} of up to {longest} tokens with {k} top logprobs each are {num * longest * k} "
                f"entries; expected at most {MAX_ENTRIES} in one reply",
                "sequences",
            )
        return to_scores(body, context.served_model.id, context.timeout_s)

    def to_reply(
        self, body: SequenceLogprobsRequest, results: Sequence[wire.Result], context: Context
    ) -> SequenceLogprobs:
        return to_arrays(body, results) if body.response_format == "binary" else to_lists(body, results)


GET_SEQUENCE_LOGPROBS = SequenceLogprobsEndpoint()
