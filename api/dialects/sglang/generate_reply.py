"""Build the outputs of SGLang's `/generate`: one per sequence of the jobs' results. Pure.

Each list of logprobs has `[logprob, token id, text or null]` per token. The input's list begins at `logprob_start_len`;
the logprob of its first entry is null.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.detokenizer import generated_text, target_tokens, token_text, top_tokens
from scorepool.api.dialects.sglang.generate import GenerateRequest
from scorepool.api.dialects.top_cap import MaxTopLogprobsIfClamped
from scorepool.wire.columns import LogprobsMode

# Logprob, token id and text. A list, because msgspec writes a schema of tuples that OpenAPI does not allow.
TokenEntry = list[float | int | str | None]


class FinishReason(Struct, frozen=True, kw_only=True):
    """Say why the output ended."""

    type: Literal["stop", "length"]
    matched: Annotated[
        int | str | UnsetType, Meta(description="The end token or the stop string. Present if `type` is `stop`.")
    ] = UNSET
    length: Annotated[int | UnsetType, Meta(description="Tokens of the output. Present if `type` is `length`.")] = UNSET


class MetaInfo(Struct, frozen=True, kw_only=True):
    """Report on an output. Logprobs are present with `return_logprob`, top ones also need `top_logprobs_num`."""

    id: str
    finish_reason: Annotated[FinishReason | None, Meta(description="null while a stream goes on.")]
    prompt_tokens: int
    completion_tokens: int
    logprobs_mode: Annotated[LogprobsMode | UnsetType, Meta(description="The mode of the logprobs.")] = UNSET
    max_top_logprobs: MaxTopLogprobsIfClamped = UNSET
    input_token_logprobs: list[TokenEntry] | UnsetType = UNSET
    output_token_logprobs: list[TokenEntry] | UnsetType = UNSET
    input_top_logprobs: list[list[TokenEntry] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[TokenEntry] | None] | UnsetType = UNSET
    input_token_ids_logprobs: Annotated[
        list[list[TokenEntry] | None] | UnsetType,
        Meta(description="Present with `token_ids_logprob`, whose order it has at each token."),
    ] = UNSET
    output_token_ids_logprobs: list[list[TokenEntry] | None] | UnsetType = UNSET
    draft_logprobs: Annotated[
        list[wire.DraftLogprob] | UnsetType,
        Meta(description="An addition. Present with `include_draft_logprobs`, in a stream in the last event."),
    ] = UNSET


class GenerateReply(Struct, frozen=True, kw_only=True):
    """Give one output."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: Annotated[int | UnsetType, Meta(description="Place of the output in a list, in a stream of several.")] = (
        UNSET
    )


def to_answers(
    body: GenerateRequest,
    results: Sequence[wire.Result],
    unique_id: str,
    max_top_logprobs: int | UnsetType = UNSET,
) -> list[GenerateReply]:
    """Build the outputs; those of a prompt are adjacent. Raise wire.Invalid if `logprob_start_len` is too large."""
    answers: list[GenerateReply] = []
    for prompt, targets, result in zip(body.prompts, body.targets, results, strict=True):
        for sequence in result.sequences:
            answers.append(to_answer(body, prompt, targets, result, sequence, answer_id(body, unique_id, len(answers))))
    if max_top_logprobs is UNSET or not body.return_logprob:
        return answers
    return [
        replace(answer, meta_info=replace(answer.meta_info, max_top_logprobs=max_top_logprobs)) for answer in answers
    ]


def answer_id(body: GenerateRequest, unique_id: str, index: int) -> str:
    """Return the id of an output."""
    return f"{unique_id}-{index}" if body.is_list else unique_id


def to_answer(
    body: GenerateRequest,
    prompt: str | list[int],
    targets: list[int],
    result: wire.Result,
    sequence: wire.SequenceResult,
    reply_id: str,
) -> GenerateReply:
    """Build the output of one sequence. Raise wire.Invalid if `logprob_start_len` is too large."""
    prompt_ids = prompt if isinstance(prompt, list) else sequence.prompt_token_ids or []
    answer = _to_answer(sequence, prompt_ids, reply_id)
    if not body.return_logprob:
        return answer
    logprobs = _logprobs(body, sequence, prompt_ids, targets) | {"logprobs_mode": result.logprobs_mode}
    if sequence.draft_logprobs is not None:
        logprobs["draft_logprobs"] = sequence.draft_logprobs
    return replace(answer, meta_info=replace(answer.meta_info, **logprobs))


def _to_answer(sequence: wire.SequenceResult, prompt_ids: list[int], reply_id: str) -> GenerateReply:
    output_ids = sequence.token_ids[sequence.num_reported_prompt_tokens :]
    return GenerateReply(
        text=generated_text(sequence),
        output_ids=output_ids,
        meta_info=MetaInfo(
            id=reply_id,
            finish_reason=_finish_reason(sequence, output_ids),
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(output_ids),
        ),
    )


def _finish_reason(sequence: wire.SequenceResult, output_ids: list[int]) -> FinishReason:
    if sequence.finish_reason != "stop":
        return FinishReason(type="length", length=len(output_ids))
    return FinishReason(type="stop", matched=output_ids[-1] if sequence.stop_reason is None else sequence.stop_reason)


def _logprobs(
    body: GenerateRequest, sequence: wire.SequenceResult, prompt_ids: list[int], targets: list[int]
) -> dict[str, Any]:
    start = len(prompt_ids) - 1 if body.start < 0 else body.start
    if start >= len(prompt_ids):
        field = "logprob_start_len"
        raise wire.Invalid(f"{field}: expected below {len(prompt_ids)}, the tokens of the input, found {start}", field)
    split = sequence.num_reported_prompt_tokens
    lists = entry_lists(body, sequence, targets)
    first_text = lists["token_logprobs"][start][-1] if start < split else None  # unknown of a token without an entry
    logprobs: dict[str, Any] = {}
    for name, entries in lists.items():
        first = [None, prompt_ids[start], first_text] if name == "token_logprobs" else None
        logprobs[f"input_{name}"] = [first, *entries[start + 1 : split]]
        logprobs[f"output_{name}"] = entries[split:]
    return logprobs


def entry_lists(body: GenerateRequest, sequence: wire.SequenceResult, target_ids: list[int]) -> dict[str, list[Any]]:
    """Return the lists of logprobs that the body asks for, with an entry per reported token."""
    places, with_text = range(len(sequence.token_ids)), body.return_text_in_logprobs
    lists: dict[str, list[Any]] = {"token_logprobs": [_token_entry(sequence, place, with_text) for place in places]}
    if body.top_logprobs_num:
        lists["top_logprobs"] = [_entries(top_tokens(sequence, place), with_text) for place in places]
    if target_ids:
        lists["token_ids_logprobs"] = [
            _entries(target_tokens(sequence, place, target_ids), with_text) for place in places
        ]
    return lists


def _token_entry(sequence: wire.SequenceResult, entry: int, with_text: bool) -> TokenEntry:
    assert sequence.logprobs is not None
    token_id = sequence.token_ids[entry]
    text = token_text(token_id, sequence.token_bytes[entry]) if with_text else None
    return [sequence.logprobs[entry], token_id, text]


def _entries(tokens: Iterable[tuple[int, bytes, float | None]], with_text: bool) -> list[TokenEntry]:
    return [
        [logprob, token_id, token_text(token_id, token_bytes) if with_text else None]
        for token_id, token_bytes, logprob in tokens
    ]
