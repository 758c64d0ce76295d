"""Choose the form of a chat's answer: JSON of a schema, or calls of functions. Pure."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from scorepool.wire.chat import check_json


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="text"):
    """Leave the answer free."""


class JsonObjectFormat(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="json_object"):
    """Ask for a JSON object."""


class JsonValueFormat(JsonObjectFormat, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="json_object"):
    """Ask for a JSON object, or for JSON that follows a schema as text-generation-inference takes it."""

    value: Annotated[dict[str, Any] | None, Meta(description="JSON Schema, as Hugging Face's client sends it.")] = None

    def __post_init__(self) -> None:
        check_json(self.value, "the values of `value`")


class NamedSchema(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Give the schema of an answer."""

    name: str
    schema: Annotated[dict[str, Any], Meta(description="JSON Schema.")]
    description: str | None = None
    strict: Annotated[bool | None, Meta(description="The answer is constrained, whatever this says.")] = None

    def __post_init__(self) -> None:
        check_json(self.schema, "the values of `schema`")


class JsonSchemaFormat(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="json_schema"):
    """Ask for JSON that follows a schema."""

    json_schema: NamedSchema


class NamedFunction(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Name one of the `tools`."""

    name: str


class NamedToolChoice(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="function"):
    """Ask for one call of a function."""

    function: NamedFunction


class AllowedTools(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """List the functions that may be called; with `required`, one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Meta(min_length=1, max_length=128)]


class AllowedToolChoice(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="allowed_tools"):
    """Allow calls of some of the `tools` only. The model sees all of them."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice
ResponseFormat = TextFormat | JsonValueFormat | JsonSchemaFormat


def json_schema_of(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    """Return the schema that the answer must follow; None leaves it free."""
    match response_format:
        case JsonSchemaFormat():
            return response_format.json_schema.schema
        case JsonValueFormat():
            return {"type": "object"} if response_format.value is None else response_format.value
        case _:
            return None


def allowed_tool_names(choice: ToolChoice | None) -> list[str]:
    """Return the names of the tools that may be called; an empty list allows all."""
    match choice:
        case NamedToolChoice():
            return [choice.function.name]
        case AllowedToolChoice():
            return [tool.function.name for tool in choice.allowed_tools.tools]
        case _:
            return []


def tool_choice_mode(choice: ToolChoice | None) -> Literal["none", "auto", "required"]:
    """Return whether the answer may, must or must not call functions."""
    match choice:
        case NamedToolChoice():
            return "required"
        case AllowedToolChoice():
            return choice.allowed_tools.mode
        case _:
            return choice or "auto"
