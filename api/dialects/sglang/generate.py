"""Read the body of SGLang's `/generate`, and translate it to one wire.Generate per prompt. Pure."""

import re
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects.fields import map_field
from scorepool.api.dialects.forms import Form, FormFields, check_one_form, form_names, given_forms, schema_form
from scorepool.api.dialects.top_k import SampledTopK, to_top_k
from scorepool.wire.columns import LogprobsMode
from scorepool.wire.generate import check_speculation
from scorepool.wire.request_fields import (
    MAX_LIST_LENGTH,
    MAX_SHOWN_TARGETS,
    ChosenSpeculation,
    Grammar,
    MinP,
    ModelName,
    MostProposedTokens,
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

DEFAULT_STREAMED_TOKENS = 4096  # at most, of an output without `max_new_tokens`
MAX_STREAMED_TOKENS = 4096  # of an output whose logprobs are streamed, with one logprob for each
MAX_STREAMED_TOKENS_ALONE = 32_768  # of an output that is streamed without logprobs


class SamplingParams(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choose how to sample. null is the default, as in SGLang. An unknown field is refused by its name."""

    max_new_tokens: Annotated[NumTokens, Meta(description="null: what fits, at most 4096.")] | None = 128
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: SampledTopK | None = None
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
        Annotated[int, Meta(ge=-1, le=2**31 - 1, description="First token of the input with an entry; -1: the last.")]
        | None
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
    stream: Annotated[bool, Meta(description="Send the output so far as an event whenever there are new tokens.")] = (
        False
    )
    model: Annotated[ModelName | None, Meta(description="An addition. Needed if several models are served.")] = None
    speculation: ChosenSpeculation | None = None
    speculation_tokens: MostProposedTokens | None = None
    include_draft_logprobs: Annotated[
        bool | None,
        Meta(
            description="An addition. Report each token that speculation proposed, in `meta_info.draft_logprobs`. "
            "Needs `return_logprob` and a model that is served with speculation."
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.include_draft_logprobs and not self.return_logprob:
            raise ValueError("`include_draft_logprobs` needs `return_logprob`")
        check_speculation(self.speculation, self.speculation_tokens, bool(self.include_draft_logprobs))
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give exactly one of `text` and `input_ids`")
        if self.input_ids is not None and len({type(prompt) for prompt in self.input_ids}) > 1:
            raise ValueError("`input_ids` is a list of token ids, or a list of such lists")
        self._check_targets()
        self._check_stream()

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

    def _check_stream(self) -> None:
        """Check that a stream is not too large: each of its events repeats those before it; raise ValueError."""
        if not self.stream:
            return
        most, what, num_entries = MAX_STREAMED_TOKENS_ALONE, "the output", self.params.num_choices
        if self.return_logprob:
            num_of_token = 1 + (self.top_logprobs_num or 0) + max(map(len, self.targets))
            most, what, num_entries = MAX_STREAMED_TOKENS, "all logprobs", num_entries * num_of_token
        asked = self.params.max_new_tokens
        num_tokens = DEFAULT_STREAMED_TOKENS if asked is None else asked
        if num_tokens**2 * num_entries > most**2:
            raise ValueError(
                f"`stream` repeats {what} in every event: with {num_entries} a token of all `n` outputs "
                f"`max_new_tokens` can be at most {int((most**2 / num_entries) ** 0.5)}"
            )

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
    forms = params.forms
    form: FormFields = forms[0].fields if forms else {}
    for prompt, targets in zip(body.prompts, body.targets, strict=True):
        yield wire.Generate(
            model=model,
            timeout_s=timeout_s,
            prompt=prompt,
            max_tokens=params.max_new_tokens,
            temperature=1.0 if params.temperature is None else params.temperature,
            top_p=params.top_p or 1.0,
            top_k=to_top_k(params.top_k),
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
            speculation=body.speculation,
            speculation_tokens=body.speculation_tokens,
            include_draft_logprobs=bool(body.include_draft_logprobs),
            **form,
            stream=body.stream,
        )
