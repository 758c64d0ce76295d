"""Read the body of vLLM's `/inference/v1/generate`, and translate it to one wire.Generate. Pure."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects.fields import map_field
from scorepool.api.dialects.forms import (
    Form,
    FormFields,
    StructuredOutputs,
    check_one_form,
    form_names,
    structured_form,
)
from scorepool.api.dialects.openai.prompt_logprobs import most_top
from scorepool.api.dialects.openai.sampling import (
    NoEffect,
    SamplingParameters,
    StreamOptions,
    check_stream_options,
    sampling_options,
)
from scorepool.api.dialects.priority import PriorityNumber, to_priority
from scorepool.api.dialects.truncation import LEFT, TruncatePromptTokens, check_truncation, truncation_fields
from scorepool.api.dialects.unsupported import check_supported
from scorepool.wire.request_fields import IfWeights, ModelName, NumTokens, TokenIds, TopLogprobs


class GenerateTokensParams(SamplingParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choose how to sample and what to report. A field that is null has its default."""

    max_tokens: Annotated[NumTokens, Meta(description="null: what fits, at most 4096.")] | None = None
    logprobs: (
        Annotated[TopLogprobs, Meta(description="Most likely tokens beside each generated one. null: no logprobs.")]
        | None
    ) = None
    prompt_logprobs: (
        Annotated[TopLogprobs, Meta(description="Most likely tokens beside each of the prompt. null: no logprobs.")]
        | None
    ) = None
    structured_outputs: StructuredOutputs | None = None
    truncate_prompt_tokens: Annotated[
        TruncatePromptTokens,
        Meta(description="Keep so many tokens at most, the last. -1: as many as the context holds."),
    ] = None
    skip_special_tokens: bool | None = None
    detokenize: bool | None = None
    output_kind: NoEffect[Literal[0, 1, 2]] | None = None

    @property
    def has_token_logprobs(self) -> bool:
        """True if the reply has the logprobs of generated tokens."""
        return self.logprobs is not None

    @property
    def has_logprobs(self) -> bool:
        """True if the reply has logprobs."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def forms(self) -> list[Form]:
        """Return the form that is given, if any."""
        form = structured_form(self.structured_outputs, "structured_outputs")
        return [] if form is None else [form]

    @property
    def num_top(self) -> int:
        """The number of most likely tokens that the job reports, of the prompt and of generated tokens."""
        return most_top(0 if self.logprob_token_ids else self.logprobs or 0, self.prompt_logprobs or 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_truncation(self.truncate_prompt_tokens)
        check_one_form(self.forms, ends_otherwise=bool(self.ignore_eos or self.min_tokens))
        check_supported(self, {"detokenize": True} if self.stop else {})  # stop strings are looked for in the text
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise ValueError(f"`min_tokens` must be at most `max_tokens`, {self.max_tokens}")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("`max_tokens` 0 generates nothing: it needs `prompt_logprobs`")


class GenerateTokensRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Continue token ids."""

    token_ids: TokenIds
    sampling_params: GenerateTokensParams
    model: Annotated[ModelName | None, Meta(description="Needed if several models are served.")] = None
    request_id: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=255,
                description="Name of the request. Sent again with the same body, it gets the same answer.",
            ),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Annotated[bool | None, Meta(description="The reply has `prompt_token_ids`.")] = None
    output_mode: Annotated[
        Literal["tokens", "text"] | None, Meta(description="`text`: choices have their text, and logprobs the tokens'.")
    ] = None
    cache_salt: (
        Annotated[
            str,
            Meta(max_length=256, description="Only requests with the same salt share cached results and prefixes."),
        ]
        | None
    ) = None
    if_weights: IfWeights = None
    priority: PriorityNumber = None

    def __post_init__(self) -> None:
        check_stream_options(self.stream_options, self.stream)
        if self.stream and self.sampling_params.prompt_logprobs is not None:
            raise ValueError("`sampling_params.prompt_logprobs` cannot be streamed")

    @property
    def num_choices(self) -> int:
        """Return the number of choices."""
        return self.sampling_params.num_choices

    @property
    def has_logprobs(self) -> bool:
        """True if the reply has logprobs."""
        return self.sampling_params.has_logprobs

    @property
    def has_text(self) -> bool:
        """True if the reply has texts beside the ids."""
        return self.output_mode == "text"


_PARAMETERS = (
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
    "logit_bias",
    "n",
    "allowed_token_ids",
    "bad_words",
    "temperature",
    "logprobs_mode",
)


def field_name(body: GenerateTokensRequest, field: str) -> str:
    """Map a field of the request to a field of the body."""
    params = body.sampling_params
    top = "prompt_logprobs" if (params.prompt_logprobs or 0) >= (params.logprobs or 0) else "logprobs"
    names = {"prompt": "token_ids", "Idempotency-Key": "request_id", "top_logprobs": f"sampling_params.{top}"}
    names |= {name: f"sampling_params.{field}" for name, field in form_names(params.forms).items()}
    names |= {"targets": "sampling_params.logprob_token_ids"}
    names |= {"truncate_to": "sampling_params.truncate_prompt_tokens"}
    return map_field(names | {name: f"sampling_params.{name}" for name in _PARAMETERS})(field)


def to_request(body: GenerateTokensRequest, model: str, timeout_s: int) -> wire.Generate:
    """Build the job of a body, which may run for `timeout_s`."""
    params = body.sampling_params
    options = sampling_options(params)
    if params.seed == -1:  # vLLM: a random one
        options["seed"] = None
    form: FormFields = params.forms[0].fields if params.forms else {}
    return wire.Generate(
        cache_salt=body.cache_salt or None,
        if_weights=body.if_weights,
        **options,
        **form,
        **truncation_fields(params.truncate_prompt_tokens, None, LEFT),
        model=model,
        priority=to_priority(body.priority),
        timeout_s=timeout_s,
        stream=bool(body.stream),
        prompt=body.token_ids,
        max_tokens=params.max_tokens,
        n=body.num_choices,
        skip_special_tokens=params.skip_special_tokens is not False,
        prompt_logprobs=params.prompt_logprobs is not None,
        logprobs=params.has_logprobs,
        top_logprobs=params.num_top,
        rank=params.prompt_logprobs is not None,
    )
