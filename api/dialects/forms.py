"""Read the form that an answer must have, as OpenAI's, vLLM's and SGLang's bodies name it. Pure.

A body gives its forms by the name of its field, each as fields of a wire.Generate; it may give one.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypedDict

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects.unsupported import check_supported
from scorepool.wire.chat import check_json
from scorepool.wire.codec import MAX_FREE_FORM_BYTES
from scorepool.wire.request_fields import FORMS, Choice, Grammar, Regex, Text

SchemaOrText = Annotated[
    dict[str, Any] | Text, Meta(description="JSON Schema that the answer follows: an object, or its text.")
]


class FormFields(TypedDict, total=False):
    """Type the fields of a wire.Generate that give its form."""

    json_schema: dict[str, Any] | None
    regex: str | None
    choice: list[str] | None
    grammar: str | None


class Form(NamedTuple):
    """A form, and the field of the body that gives it."""

    name: str
    fields: FormFields


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choose the form of an answer, as vLLM names it: one of `json`, `json_object`, `regex`, `choice` and `grammar`."""

    json: SchemaOrText | None = None
    json_object: bool | None = None
    regex: Regex | None = None
    choice: Choice | None = None
    grammar: Grammar | None = None
    structural_tag: Annotated[None, Meta(description="Not supported: give `tools`.")] = None
    disable_fallback: Annotated[bool | None, Meta(description="Has no effect here.")] = None
    disable_any_whitespace: Annotated[
        bool | None, Meta(description="Has no effect here: JSON is written without spaces between its parts.")
    ] = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: None = None

    def __post_init__(self) -> None:
        check_supported(self, {"disable_additional_properties": False})
        if len(self.forms) != 1:
            raise ValueError("give exactly one of `json`, `json_object`, `regex`, `choice` and `grammar`")

    @property
    def forms(self) -> list[Form]:
        """Return the forms that are given."""
        return given_forms(
            {
                "json": schema_form(self.json, "json"),
                "json_object": {"json_schema": {"type": "object"}} if self.json_object else None,
                "regex": self.regex and {"regex": self.regex},
                "choice": self.choice and {"choice": self.choice},
                "grammar": self.grammar and {"grammar": self.grammar},
            }
        )


def structured_form(outputs: StructuredOutputs | None, name: str) -> Form | None:
    """Return the form of `structured_outputs`, which is the field `name`."""
    if outputs is None:
        return None
    [form] = outputs.forms
    return Form(f"{name}.{form.name}", form.fields)


def schema_form(given: dict[str, Any] | str | None, name: str) -> FormFields | None:
    """Return the form of a JSON Schema or its text; raise ValueError."""
    if given is None:
        return None
    schema = given
    if isinstance(schema, str):
        encoded = schema.encode()
        if len(encoded) > MAX_FREE_FORM_BYTES:
            raise ValueError(f"`{name}`: expected at most {MAX_FREE_FORM_BYTES} bytes, found {len(encoded)}")
        try:
            schema = wire.parse(encoded, dict[str, Any], name="it")
        except wire.Invalid as error:
            raise ValueError(f"`{name}` is no JSON Schema: {error.message}") from None
    check_json(schema, f"`{name}`: the values of the schema")
    return {"json_schema": schema}


def given_forms(forms: dict[str, Any]) -> list[Form]:
    """Return the forms that are given, by the names of their fields."""
    return [Form(name, fields) for name, fields in forms.items() if fields]


def check_one_form(forms: Sequence[Form], *, ends_otherwise: bool) -> None:
    """Check that at most one form is given, and nothing else that decides where the text ends; raise ValueError.

    One form under two names passes: clients name it so for servers of two ages.
    """
    for other in forms[1:]:
        if other.fields != forms[0].fields:
            raise ValueError(f"`{other.name}` is given beside `{forms[0].name}`; expected one of them")
    if forms and ends_otherwise:
        raise ValueError(f"`{forms[0].name}` ends the answer: it goes with neither `ignore_eos` nor `min_tokens`")


def form_names(forms: Sequence[Form]) -> dict[str, str]:
    """Return the field of the body for each field of a wire.Generate that may give its form."""
    return {field: form.name for form in forms[:1] for field in FORMS}
