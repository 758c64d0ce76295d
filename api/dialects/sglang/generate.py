"""SGLang's `/generate`: one wire.Generate a prompt, and one answer a sequence of their results. Pure.

Each list of logprobs has `[logprob, token id, text or null]` a token. Of the input it begins at `logprob_start_len`,
with null for that token, wherever it stands.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from scorepool import wire
from scorepool.api.dialects.fields import in_words
from scorepool.api.dialects.openai.detokenizer import generated_text, token_text
from scorepool.wire.request import ModelName, Penalty, StopString, StopTokenIds, Text, TokenId, TokenIds, TopLogprobs

Told = list[
    float | int | str | None
]  # logprob, token id, text; msgspec writes no schema of a tuple that OpenAPI allows
MAX_SEED = 2**63 - 1


class SamplingParams(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is not here is refused by its name."""

    max_new_tokens: Annotated[int, Meta(ge=0, le=131_072)] = 128
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] = -1
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    stop: StopString | Annotated[list[StopString], Meta(max_length=64)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    sampling_seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool = False
    min_new_tokens: Annotated[int, Meta(ge=0, le=131_072)] = 0
    no_stop_trim: Annotated[bool, Meta(description="The stop string or token is in the text.")] = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: Annotated[bool, Meta(description="Has no effect here.")] = True

    def __post_init__(self) -> None:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"`min_new_tokens` must be at most `max_new_tokens`, {self.max_new_tokens}")
        if self.ignore_eos and self.stop_token_ids:
            raise ValueError("`ignore_eos` makes SGLang ignore `stop_token_ids` too: give one of them")


class GenerateRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`model` is ours, for a server of several."""

    text: Text | Annotated[list[Text], Meta(min_length=1)] | None = None
    input_ids: Annotated[list[TokenId | TokenIds], Meta(min_length=1)] | None = None
    sampling_params: SamplingParams = SamplingParams()
    return_logprob: bool = False
    logprob_start_len: Annotated[
        int, Meta(ge=-1, description="From which token of the input on logprobs are told; -1: from the last.")
    ] = -1
    top_logprobs_num: TopLogprobs = 0
    return_text_in_logprobs: bool = False
    token_ids_logprob: Annotated[None, Meta(description="Not supported; /v1/score is.")] = None
    stream: bool = False
    model: ModelName | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give exactly one of `text` and `input_ids`")
        if self.input_ids is not None and len({type(part) for part in self.input_ids}) > 1:
            raise ValueError("`input_ids` is a list of token ids, or a list of such lists")
        if self.stream:
            raise ValueError("`stream` is not supported here; /v1/completions streams")

    @property
    def prompts(self) -> list[str | list[int]]:
        if self.text is not None:
            return [self.text] if isinstance(self.text, str) else list(self.text)
        assert self.input_ids is not None
        return [self.input_ids] if isinstance(self.input_ids[0], int) else self.input_ids  # type: ignore[return-value,list-item]

    @property
    def is_list(self) -> bool:
        """Whether the answer is one."""
        given = self.text if self.input_ids is None else self.input_ids[0]
        return isinstance(given, list) or self.sampling_params.n > 1


class FinishReason(Struct, frozen=True, kw_only=True):
    """Either of the last two is there: what ended it."""

    type: Literal["stop", "length"]
    matched: int | str | UnsetType = UNSET  # the token, the model's end tokens included, or the stop string
    length: int | UnsetType = UNSET  # of the output


class MetaInfo(Struct, frozen=True, kw_only=True):
    """The logprobs are there when they were asked for, the top ones when `top_logprobs_num` is not 0."""

    id: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    input_token_logprobs: list[Told] | UnsetType = UNSET
    output_token_logprobs: list[Told] | UnsetType = UNSET
    input_top_logprobs: list[list[Told] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Told] | None] | UnsetType = UNSET


class Generated(Struct, frozen=True, kw_only=True):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


def to_param(body: GenerateRequest) -> Callable[[str], str]:
    """A field of its wire.Generates in its words."""
    names = {
        "prompt": "text" if body.input_ids is None else "input_ids",
        "max_tokens": "sampling_params.max_new_tokens",
        "min_tokens": "sampling_params.min_new_tokens",
        "stop_token_ids": "sampling_params.stop_token_ids",
    }
    return in_words(names, listed="prompt")


def to_requests(body: GenerateRequest, model: str, timeout_s: int) -> list[wire.Generate]:
    """One a prompt, so that the workers of a model share them."""
    params = body.sampling_params
    return [
        wire.Generate(
            model=model,
            timeout_s=timeout_s,
            prompt=prompt,
            max_tokens=params.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            min_p=params.min_p,
            seed=params.sampling_seed,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            repetition_penalty=params.repetition_penalty,
            stop=[params.stop] if isinstance(params.stop, str) else params.stop or [],
            stop_token_ids=params.stop_token_ids or [],
            ignore_eos=params.ignore_eos,
            min_tokens=params.min_new_tokens,
            include_stop_str_in_output=params.no_stop_trim,
            skip_special_tokens=params.skip_special_tokens,
            n=params.n,
            prompt_logprobs=params.max_new_tokens == 0 or (body.return_logprob and body.logprob_start_len >= 0),
            logprobs=body.return_logprob,
            top_logprobs=body.top_logprobs_num if body.return_logprob else 0,
        )
        for prompt in body.prompts
    ]


def to_answers(body: GenerateRequest, results: Sequence[wire.Result], id: str) -> list[Generated]:  # noqa: A002
    """Those of a prompt stand together. Raises wire.Invalid where a prompt ends before `logprob_start_len`."""
    answers: list[Generated] = []
    for prompt, result in zip(body.prompts, results, strict=True):
        for scored in result.sequences:
            ids = prompt if isinstance(prompt, list) else scored.prompt_token_ids or []
            answers.append(_to_answer(body, scored, ids, f"{id}-{len(answers)}" if body.is_list else id))
    return answers


def _to_answer(body: GenerateRequest, scored: wire.SequenceResult, prompt_ids: list[int], id: str) -> Generated:  # noqa: A002
    output_ids = scored.token_ids[scored.num_reported_prompt_tokens :]
    meta: dict[str, Any] = _logprobs(body, scored, prompt_ids) if body.return_logprob else {}
    return Generated(
        text=generated_text(scored),
        output_ids=output_ids,
        meta_info=MetaInfo(
            id=id,
            finish_reason=_finish_reason(scored, output_ids),
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(output_ids),
            **meta,
        ),
    )


def _finish_reason(scored: wire.SequenceResult, output_ids: list[int]) -> FinishReason:
    if scored.finish_reason != "stop":
        return FinishReason(type="length", length=len(output_ids))
    return FinishReason(type="stop", matched=output_ids[-1] if scored.stop_reason is None else scored.stop_reason)


def _logprobs(body: GenerateRequest, scored: wire.SequenceResult, prompt_ids: list[int]) -> dict[str, Any]:
    start = len(prompt_ids) - 1 if body.logprob_start_len < 0 else body.logprob_start_len
    if start >= len(prompt_ids):
        field = "logprob_start_len"
        raise wire.Invalid(f"{field}: expected below {len(prompt_ids)}, the tokens of the input, found {start}", field)
    split, with_text = scored.num_reported_prompt_tokens, body.return_text_in_logprobs
    entries = [_told(scored, entry, with_text) for entry in range(len(scored.token_ids))]
    first_text = entries[start][-1] if start < split else None  # of what is not reported there is no text
    found: dict[str, Any] = {
        "input_token_logprobs": [[None, prompt_ids[start], first_text], *entries[start + 1 : split]],
        "output_token_logprobs": entries[split:],
    }
    if body.top_logprobs_num:
        tops = [_tops(scored, entry, with_text) for entry in range(len(scored.token_ids))]
        found |= {"input_top_logprobs": [None, *tops[start + 1 : split]], "output_top_logprobs": tops[split:]}
    return found


def _told(scored: wire.SequenceResult, entry: int, with_text: bool) -> Told:
    assert scored.logprobs is not None
    token_id = scored.token_ids[entry]
    return [scored.logprobs[entry], token_id, token_text(token_id, scored.token_bytes[entry]) if with_text else None]


def _tops(scored: wire.SequenceResult, entry: int, with_text: bool) -> list[Told]:
    assert scored.top_ids is not None
    assert scored.top_bytes is not None
    assert scored.top_logprobs is not None
    columns = (scored.top_logprobs[entry].values(), scored.top_ids[entry], scored.top_bytes[entry])
    return [
        [value, token_id, token_text(token_id, piece) if with_text else None]
        for value, token_id, piece in zip(*columns, strict=True)
    ]
