"""Define fields that chat and completions share: the form of the answer, how much of the prompt is kept. Pure."""

from typing import Annotated, Any, TypeVar

from msgspec import Meta

from scorepool.api.dialects.forms import (
    Form,
    FormFields,
    SchemaOrText,
    StructuredOutputs,
    check_one_form,
    form_names,
    given_forms,
    schema_form,
    structured_form,
)
from scorepool.api.dialects.openai.sampling import SamplingRequest
from scorepool.api.dialects.openai.structured_outputs import ResponseFormat, json_schema_of
from scorepool.api.dialects.truncation import (
    LEFT,
    NAMES,
    Side,
    TruncatePromptTokens,
    TruncationFields,
    check_truncation,
    truncation_fields,
)
from scorepool.wire.request_fields import Choice, Grammar, Regex

T = TypeVar("T")
Earlier = Annotated[T, Meta(description="vLLM's name of the field of `structured_outputs` before there was that.")]


class GenerationRequest(SamplingRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choose a form, and how much of the prompt is kept.

    The form is `response_format` of OpenAI, or what vLLM and SGLang have beside it: one at most.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Earlier[SchemaOrText] | None = None
    guided_regex: Earlier[Regex] | None = None
    guided_choice: Earlier[Choice] | None = None
    guided_grammar: Earlier[Grammar] | None = None
    regex: Annotated[Regex, Meta(description="SGLang's name of `structured_outputs.regex`.")] | None = None
    ebnf: Annotated[Grammar, Meta(description="SGLang's name of `structured_outputs.grammar`.")] | None = None
    truncate_prompt_tokens: TruncatePromptTokens = None
    truncation_side: Annotated[Side | None, Meta(description="Side on which the prompt is cut. null: left.")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_truncation(self.truncate_prompt_tokens)
        check_one_form(self.forms, ends_otherwise=bool(self.ignore_eos or self.min_tokens))

    @property
    def forms(self) -> list[Form]:
        """Return the forms that are given."""
        schema = json_schema_of(self.response_format)
        outputs = structured_form(self.structured_outputs, "structured_outputs")
        forms: dict[str, Any] = {
            "response_format": None if schema is None else {"json_schema": schema},
            "structured_outputs" if outputs is None else outputs.name: outputs and outputs.fields,
            "guided_json": schema_form(self.guided_json, "guided_json"),
            "guided_regex": self.guided_regex and {"regex": self.guided_regex},
            "guided_choice": self.guided_choice and {"choice": self.guided_choice},
            "guided_grammar": self.guided_grammar and {"grammar": self.guided_grammar},
            "regex": self.regex and {"regex": self.regex},
            "ebnf": self.ebnf and {"grammar": self.ebnf},
        }
        return given_forms(forms)

    @property
    def truncation_fields(self) -> TruncationFields:
        """Return how much of the prompt is kept, as fields of a wire.Generate."""
        return truncation_fields(self.truncate_prompt_tokens, self.truncation_side, LEFT)

    @property
    def field_names(self) -> dict[str, str]:
        """Return the fields of the body for those of a wire.Generate that have other names."""
        return form_names(self.forms) | NAMES

    @property
    def form_fields(self) -> FormFields:
        """Return the form as fields of a wire.Generate."""
        return self.forms[0].fields if self.forms else {}
