"""The form of a chat's answer: JSON of a schema, or calls of functions. Pure."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from scorepool.wire.request import check_integers


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="text"):
    pass


class JsonObjectFormat(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="json_object"):
    pass


class NamedSchema(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    schema: Annotated[dict[str, Any], Meta(description="JSON Schema.")]
    description: str | None = None
    strict: Annotated[bool | None, Meta(description="The answer is constrained, whatever this says.")] = None

    def __post_init__(self) -> None:
        check_integers(self.schema, "the numbers of `schema`")


class JsonSchemaFormat(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="json_schema"):
    json_schema: NamedSchema


class NamedTool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str


class FunctionName(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="function"):
    function: NamedTool


class Allowed(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionName], Meta(min_length=1, max_length=128)]


class AllowedTools(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="allowed_tools"):
    allowed_tools: Allowed


ToolChoice = Literal["none", "auto", "required"] | FunctionName | AllowedTools
ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


def json_schema_of(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    match response_format:
        case JsonSchemaFormat():
            return response_format.json_schema.schema
        case JsonObjectFormat():
            return {"type": "object"}
        case _:
            return None


def allowed_tool_names(choice: ToolChoice | None) -> list[str]:
    """Return the names of the tools that may be called; an empty list allows all."""
    match choice:
        case FunctionName():
            return [choice.function.name]
        case AllowedTools():
            return [tool.function.name for tool in choice.allowed_tools.tools]
        case _:
            return []


def tool_choice_mode(choice: ToolChoice | None) -> Literal["none", "auto", "required"]:
    match choice:
        case FunctionName():
            return "required"
        case AllowedTools():
            return choice.allowed_tools.mode
        case _:
            return choice or "auto"
