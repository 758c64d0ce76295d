"""Translate SGLang's `/generate`: one wire.Generate per prompt, one answer per sequence of their results. Pure.

Each list of logprobs has `[logprob, token id, text or null]` per token. The input's list begins at `logprob_start_len`;
the logprob of its first entry is null.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.detokenizer import generated_text, target_tokens, token_text, top_tokens
from scorepool.api.dialects.fields import map_field
from scorepool.api.dialects.forms import Form, FormFields, check_one_form, form_names, given_forms, schema_form
from scorepool.api.dialects.protocol import Context, Endpoint, JobCount
from scorepool.api.dialects.sglang import foreign_fields
from scorepool.api.dialects.top_cap import MaxTopLogprobsIfClamped, clamp_fields
from scorepool.wire.columns import LogprobsMode
from scorepool.wire.request import (
    MAX_LIST_LENGTH,
    MAX_SHOWN_TARGETS,
    Grammar,
    MinP,
    ModelName,
    NumChoices,
    NumTokens,
    Penalty,
    Regex,
    RepetitionPenalty,
    Seed,
    StopString,
    StopStrings,
    StopTokenIds,
    Temperature,
    Text,
    TokenId,
    TokenIds,
    TopK,
    TopP,
)

# Logprob, token id and text. A list, because msgspec writes a schema of tuples that OpenAPI does not allow.
TokenEntry = list[float | int | str | None]


class SamplingParams(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choose how to sample. null is the default, as in SGLang. An unknown field is refused by its name."""

    max_new_tokens: Annotated[NumTokens, Meta(description="null: what fits, at most 4096.")] | None = 128
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    min_p: MinP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop: StopString | StopStrings | None = None
    n: NumChoices | None = None
    sampling_seed: Seed | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    min_new_tokens: NumTokens | None = None
    no_stop_trim: Annotated[bool | None, Meta(description="The stop string or token is in the text.")] = None
    skip_special_tokens: Annotated[bool | None, Meta(description="null is true.")] = None
    spaces_between_special_tokens: Annotated[bool | None, Meta(description="Has no effect here.")] = None
    json_schema: Annotated[Text, Meta(description="The text of a JSON Schema; `$$ANY$$`: any JSON.")] | None = None
    regex: Regex | None = None
    ebnf: Grammar | None = None

    def __post_init__(self) -> None:
        check_one_form(self.forms, ends_otherwise=bool(self.ignore_eos or self.min_new_tokens))
        if self.max_new_tokens is not None and (self.min_new_tokens or 0) > self.max_new_tokens:
            raise ValueError(f"`min_new_tokens` must be at most `max_new_tokens`, {self.max_new_tokens}")
        if self.ignore_eos and self.stop_token_ids:
            raise ValueError("`ignore_eos` makes SGLang ignore `stop_token_ids` too: give one of them")

    @property
    def forms(self) -> list[Form]:
        """Return the forms that are given."""
        return given_forms(
            {
                "json_schema": schema_form("{}" if self.json_schema == "$$ANY$$" else self.json_schema, "json_schema"),
                "regex": self.regex and {"regex": self.regex},
                "ebnf": self.ebnf and {"grammar": self.ebnf},
            }
        )

    @property
    def num_choices(self) -> int:
        """Return the number of answers per prompt."""
        return self.n or 1


class GenerateRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Continue prompts. null is the default, as in SGLang."""

    text: Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_LIST_LENGTH)] | None = None
    input_ids: Annotated[list[TokenId | TokenIds], Meta(min_length=1, max_length=MAX_LIST_LENGTH)] | None = None
    sampling_params: SamplingParams | None = None
    return_logprob: bool | None = False
    logprob_start_len: (
        Annotated[int, Meta(ge=-1, description="First token of the input with an entry; -1: the last.")] | None
    ) = -1
    top_logprobs_num: TopK | None = 0
    return_text_in_logprobs: bool = False
    token_ids_logprob: (
        Annotated[
            list[TokenId | Annotated[list[TokenId], Meta(max_length=MAX_SHOWN_TARGETS)]],
            Meta(
                max_length=MAX_LIST_LENGTH,
                description="Token ids whose logprobs are reported at each token: at most 1024, or a list for each "
                "prompt. Needs `return_logprob`.",
            ),
        ]
        | None
    ) = None
    logprobs_mode: (
        Annotated[
            LogprobsMode,
            Meta(
                description="An addition, as in /v1/completions. null: the server's default, SCOREPOOL_LOGPROBS_MODE."
            ),
        ]
        | None
    ) = None
    stream: bool = False
    model: Annotated[ModelName | None, Meta(description="An addition. Needed if several models are served.")] = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give exactly one of `text` and `input_ids`")
        if self.input_ids is not None and len({type(prompt) for prompt in self.input_ids}) > 1:
            raise ValueError("`input_ids` is a list of token ids, or a list of such lists")
        self._check_targets()
        if self.stream:
            raise ValueError("`stream` is not supported here; /v1/completions streams")

    def _check_targets(self) -> None:
        """Check the form of `token_ids_logprob`; raise ValueError."""
        targets = self.token_ids_logprob or []
        num_lists = sum(isinstance(each, list) for each in targets)
        if num_lists not in (0, len(targets)):
            raise ValueError("`token_ids_logprob` is a list of token ids, or a list of such lists")
        if num_lists and num_lists != len(self.prompts):
            raise ValueError(f"`token_ids_logprob` has {num_lists} lists; expected {len(self.prompts)}, one per prompt")
        if not num_lists and len(targets) > MAX_SHOWN_TARGETS:
            raise ValueError(f"`token_ids_logprob` has {len(targets)} ids; expected at most {MAX_SHOWN_TARGETS}")
        if targets and not self.return_logprob:
            raise ValueError("`token_ids_logprob` needs `return_logprob`: true")

    @property
    def targets(self) -> list[list[int]]:
        """Return the token ids to report, for each prompt."""
        given = self.token_ids_logprob or []
        shared = [each for each in given if isinstance(each, int)]
        return [each for each in given if isinstance(each, list)] or [shared] * len(self.prompts)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each as text or as token ids."""
        if self.text is not None:
            return [self.text] if isinstance(self.text, str) else list(self.text)
        assert self.input_ids is not None
        return [self.input_ids] if isinstance(self.input_ids[0], int) else self.input_ids  # type: ignore[return-value,list-item]

    @property
    def is_list(self) -> bool:
        """True if the reply is a list."""
        given = self.text if self.input_ids is None else self.input_ids[0]
        return isinstance(given, list) or self.params.num_choices > 1

    @property
    def params(self) -> SamplingParams:
        """Return the sampling parameters, the defaults if none are given."""
        return self.sampling_params or SamplingParams()

    @property
    def start(self) -> int:
        """Return the index of the first token of the input with an entry; -1: the last."""
        return -1 if self.logprob_start_len is None else self.logprob_start_len


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
    finish_reason: FinishReason
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


class GenerateReply(Struct, frozen=True, kw_only=True):
    """Give one output."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo


def field_name(body: GenerateRequest, field: str) -> str:
    """Map a field of the requests to a field of the body."""
    names = {
        "prompt": "text" if body.input_ids is None else "input_ids",
        "temperature": "sampling_params.temperature",
        "max_tokens": "sampling_params.max_new_tokens",
        "min_tokens": "sampling_params.min_new_tokens",
        "stop_token_ids": "sampling_params.stop_token_ids",
    }
    names |= {name: f"sampling_params.{form}" for name, form in form_names(body.params.forms).items()}
    targets = re.fullmatch(r"(?:\[(\d+)\]\.)?targets(.*)", field)
    if targets is None:
        return map_field(names, list_field="prompt")(field)
    is_nested = any(isinstance(each, list) for each in body.token_ids_logprob or ())
    return "token_ids_logprob" + (f"[{targets[1] or 0}]" if is_nested else "") + targets[2]


def to_requests(body: GenerateRequest, model: str, timeout_s: int) -> Iterator[wire.Generate]:
    """Build one request per prompt, so that the workers of a model share the prompts."""
    params = body.params
    form: FormFields = params.forms[0].fields if params.forms else {}
    for prompt, targets in zip(body.prompts, body.targets, strict=True):
        yield wire.Generate(
            model=model,
            timeout_s=timeout_s,
            prompt=prompt,
            max_tokens=params.max_new_tokens,
            temperature=1.0 if params.temperature is None else params.temperature,
            top_p=params.top_p or 1.0,
            top_k=max(params.top_k or 0, 0),
            min_p=params.min_p or 0.0,
            seed=params.sampling_seed,
            frequency_penalty=params.frequency_penalty or 0.0,
            presence_penalty=params.presence_penalty or 0.0,
            repetition_penalty=params.repetition_penalty or 1.0,
            stop=[params.stop] if isinstance(params.stop, str) else params.stop or [],
            stop_token_ids=params.stop_token_ids or [],
            ignore_eos=bool(params.ignore_eos),
            min_tokens=params.min_new_tokens or 0,
            include_stop_str_in_output=bool(params.no_stop_trim),
            skip_special_tokens=params.skip_special_tokens is not False,
            n=params.num_choices,
            prompt_logprobs=params.max_new_tokens == 0 or (bool(body.return_logprob) and body.start >= 0),
            logprobs=bool(body.return_logprob),
            logprobs_mode=body.logprobs_mode,
            top_logprobs=(body.top_logprobs_num or 0) if body.return_logprob else 0,
            targets=targets or None,
            target_bytes=bool(targets),
            **form,
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
            prompt_ids = prompt if isinstance(prompt, list) else sequence.prompt_token_ids or []
            answer_id = f"{unique_id}-{len(answers)}" if body.is_list else unique_id
            answer = _to_answer(body, sequence, prompt_ids, answer_id)
            if body.return_logprob:
                logprobs = _logprobs(body, sequence, prompt_ids, targets)
                logprobs |= {"logprobs_mode": result.logprobs_mode, "max_top_logprobs": max_top_logprobs}
                info = replace(answer.meta_info, **logprobs)
                answer = replace(answer, meta_info=info)
            answers.append(answer)
    return answers


def _to_answer(
    body: GenerateRequest, sequence: wire.SequenceResult, prompt_ids: list[int], answer_id: str
) -> GenerateReply:
    output_ids = sequence.token_ids[sequence.num_reported_prompt_tokens :]
    return GenerateReply(
        text=generated_text(sequence),
        output_ids=output_ids,
        meta_info=MetaInfo(
            id=answer_id,
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
    body: GenerateRequest, sequence: wire.SequenceResult, prompt_ids: list[int], target_ids: list[int]
) -> dict[str, Any]:
    start = len(prompt_ids) - 1 if body.start < 0 else body.start
    if start >= len(prompt_ids):
        field = "logprob_start_len"
        raise wire.Invalid(f"{field}: expected below {len(prompt_ids)}, the tokens of the input, found {start}", field)
    split, with_text = sequence.num_reported_prompt_tokens, body.return_text_in_logprobs
    entries = [_token_entry(sequence, entry, with_text) for entry in range(len(sequence.token_ids))]
    first_text = entries[start][-1] if start < split else None  # the text of a token that is not reported is unknown
    logprobs: dict[str, Any] = {
        "input_token_logprobs": [[None, prompt_ids[start], first_text], *entries[start + 1 : split]],
        "output_token_logprobs": entries[split:],
    }
    if body.top_logprobs_num:
        top = [_entries(top_tokens(sequence, entry), with_text) for entry in range(len(sequence.token_ids))]
        logprobs |= {"input_top_logprobs": [None, *top[start + 1 : split]], "output_top_logprobs": top[split:]}
    if target_ids:
        of_ids = [
            _entries(target_tokens(sequence, entry, target_ids), with_text) for entry in range(len(sequence.token_ids))
        ]
        logprobs |= {
            "input_token_ids_logprobs": [None, *of_ids[start + 1 : split]],
            "output_token_ids_logprobs": of_ids[split:],
        }
    return logprobs


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


class GenerateEndpoint(Endpoint[GenerateRequest]):
    name = "generate"
    path = "/generate"
    summary = "Continue prompts"
    description = "The reply is a list if the request has several prompts, or if `n` is more than 1."
    example: ClassVar = {"text": "import", "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}
    body_type = GenerateRequest
    reply_type = GenerateReply | list[GenerateReply]
    foreign_fields = foreign_fields.GENERATE

    def job_count(self, body: GenerateRequest) -> JobCount:
        return JobCount(len(body.prompts), "text" if body.input_ids is None else "input_ids", "prompts")

    def to_requests(self, body: GenerateRequest, context: Context) -> Iterable[wire.Request]:
        assert context.served_model is not None
        return to_requests(body, context.served_model.id, context.timeout_s)

    def to_reply(
        self, body: GenerateRequest, results: Sequence[wire.Result], context: Context
    ) -> GenerateReply | list[GenerateReply]:
        answers = to_answers(body, results, context.unique_id, context.max_top_logprobs)
        return answers if body.is_list else answers[0]

    def clamp_top_logprobs(self, body: GenerateRequest, cap: int) -> GenerateRequest:
        return clamp_fields(body, cap, "top_logprobs_num") if body.return_logprob else body

    def field_name(self, body: GenerateRequest, field: str) -> str:
        return field_name(body, field)


GENERATE = GenerateEndpoint()
