"""Read the body of text-generation-inference's routes, and translate it to one wire.Generate. Pure."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects.fields import map_field
from scorepool.api.dialects.forms import FormFields, schema_form
from scorepool.api.dialects.top_k import MAX_GIVEN, to_top_k
from scorepool.api.dialects.truncation import LEFT, truncation_fields
from scorepool.api.dialects.unsupported import check_supported
from scorepool.wire.request_fields import (
    FORMS,
    MAX_NUM_TOKENS,
    ModelName,
    Penalty,
    Regex,
    RepetitionPenalty,
    Seed,
    StopStrings,
    Text,
    TopK,
    TopP,
)


class JsonGrammar(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="json"):
    """Ask for JSON that follows a schema."""

    value: dict[str, Any] | Text


class RegexGrammar(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="regex"):
    """Ask for a text that the expression matches as a whole."""

    value: Regex


class SchemaOfGrammar(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Give a schema with its name."""

    schema: dict[str, Any]
    name: str | None = None
    strict: bool | None = None


class JsonSchemaGrammar(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="json_schema"):
    """Ask for JSON that follows a named schema."""

    value: SchemaOfGrammar


class TextGenerationParameters(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choose how to sample and what to report. A field that is null has its default."""

    adapter_id: Annotated[ModelName | None, Meta(description="LoRA adapter of the model.")] = None
    best_of: Annotated[Annotated[int, Meta(le=2**31 - 1)] | None, Meta(description="Only 1.")] = None
    decoder_input_details: Annotated[
        bool | None, Meta(description="Report the prompt's tokens as `prefill`. Needs `details`.")
    ] = None
    details: bool | None = None
    do_sample: Annotated[
        bool | None, Meta(description="false and null: greedy, unless a temperature, `top_k` or `top_p` is given.")
    ] = None
    frequency_penalty: Penalty | None = None
    grammar: JsonGrammar | RegexGrammar | JsonSchemaGrammar | None = None
    max_new_tokens: (
        Annotated[int, Meta(ge=1, le=MAX_NUM_TOKENS, description="null: what fits, at most 4096.")] | None
    ) = None
    repetition_penalty: RepetitionPenalty | None = None
    return_full_text: Annotated[bool | None, Meta(description="true: `generated_text` begins with the prompt.")] = None
    seed: Seed | None = None
    stop: StopStrings | None = None
    temperature: Annotated[float, Meta(gt=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=1, le=MAX_GIVEN)] | None = None
    top_n_tokens: Annotated[TopK | None, Meta(description="Most likely tokens beside each generated one.")] = None
    top_p: TopP | None = None
    truncate: (
        Annotated[int, Meta(ge=1, le=2**31 - 1, description="Keep so many tokens of the prompt at most, the last.")]
        | None
    ) = None
    typical_p: Annotated[float | None, Meta(description="Only 1.")] = None
    watermark: Annotated[bool | None, Meta(description="Only false.")] = None

    def __post_init__(self) -> None:
        check_supported(self, {"best_of": 1, "typical_p": 1.0, "watermark": False})
        if self.decoder_input_details and not self.details:
            raise ValueError("`decoder_input_details` needs `details`: true")
        self.form_fields  # noqa: B018 - a schema is checked when the body is read

    @property
    def samples(self) -> bool:
        """True if tokens are sampled, and not the most likely ones."""
        filters = (self.top_k, self.top_p not in (None, 1), self.temperature not in (None, 1))
        return bool(self.do_sample or any(filters))

    @property
    def form_fields(self) -> FormFields:
        """Return the form of the text as fields of a wire.Generate; raise ValueError."""
        match self.grammar:
            case JsonGrammar(value=schema):
                return schema_form(schema, "grammar") or {}
            case RegexGrammar(value=pattern):
                return {"regex": pattern}
            case JsonSchemaGrammar(value=named):
                return schema_form(named.schema, "grammar") or {}
            case _:
                return {}


class TextGenerationRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Continue a text."""

    inputs: Annotated[str, Meta(min_length=1, max_length=8_000_000)]
    parameters: TextGenerationParameters | None = None
    stream: Annotated[bool | None, Meta(description="true: `POST /` answers with server-sent events.")] = None
    model: Annotated[ModelName | None, Meta(description="An addition. Needed if several models are served.")] = None

    @property
    def params(self) -> TextGenerationParameters:
        """Return the parameters, the defaults if none are given."""
        return self.parameters or TextGenerationParameters()


Route = Literal["whole", "stream"]
_NAMES = {
    "prompt": "inputs",
    "adapter": "parameters.adapter_id",
    "max_tokens": "parameters.max_new_tokens",
    "truncate_to": "parameters.truncate",
    "top_logprobs": "parameters.top_n_tokens",
    "temperature": "parameters.temperature",
    **dict.fromkeys(FORMS, "parameters.grammar"),
}
field_name = map_field(_NAMES)


def to_request(body: TextGenerationRequest, model: str, timeout_s: int, *, stream: bool) -> wire.Generate:
    """Build the job of a body. Raise wire.Invalid."""
    params = body.params
    if stream and params.decoder_input_details:
        field = "parameters.decoder_input_details"
        raise wire.Invalid(f"{field}: it cannot be streamed; expected false", field)
    has_details = bool(params.details) or stream
    return wire.Generate(
        **params.form_fields,
        **truncation_fields(params.truncate, None, LEFT),
        model=model,
        adapter=params.adapter_id,
        timeout_s=timeout_s,
        prompt=body.inputs,
        max_tokens=params.max_new_tokens,
        temperature=(params.temperature or 1.0) if params.samples else 0.0,
        top_p=params.top_p or 1.0,
        top_k=to_top_k(params.top_k),
        seed=params.seed,
        frequency_penalty=params.frequency_penalty or 0.0,
        repetition_penalty=params.repetition_penalty or 1.0,
        stop=params.stop or [],
        include_stop_str_in_output=True,
        skip_special_tokens=True,
        prompt_logprobs=bool(params.decoder_input_details),
        logprobs=has_details,
        logprobs_mode="raw_logprobs" if has_details and not params.samples else None,
        top_logprobs=(params.top_n_tokens or 0) if has_details else 0,
        stream=stream,
    )
