"""What a chat is made of: messages, and the tools that an answer may call; and their translation to the wire. Pure."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from scorepool import wire
from scorepool.wire.request import Text

ROLES: dict[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer word for it
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


Copy = Annotated[Any, Meta(description="What the SDK, or litellm, found in the rest. Not read.")]


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="text"):
    text: Text


class Function(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: Annotated[str, Meta(description="JSON.")]


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One that the assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: Function


class GivenFunction(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: Annotated[str | dict[str, Any], Meta(description="JSON, or what it says: templates want an object.")]
    parsed_arguments: Copy = None


class GivenToolCall(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of an earlier answer, as the SDK sends it back."""

    id: str
    type: Literal["function"] = "function"
    function: GivenFunction
    index: Copy = None


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`reasoning_content` is as an answer has it, for templates that show a model its own. What is null or empty of
    OpenAI's is here because its SDK writes it into the answers that clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    reasoning_content: Text | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[GivenToolCall] | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    parsed: Copy = None
    provider_specific_fields: Copy = None

    def __post_init__(self) -> None:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message without `tool_calls` needs `content`")
        for call in self.tool_calls or ():
            _to_wire(call)

    def to_wire(self) -> wire.Message:
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return wire.Message(
            role=ROLES[self.role],
            content=content or "",
            reasoning_content=self.reasoning_content,
            name=self.name,
            tool_call_id=self.tool_call_id,
            tool_calls=[_to_wire(call) for call in self.tool_calls or ()],
        )


class ToolFunction(wire.Tool, frozen=True, forbid_unknown_fields=True, kw_only=True):
    strict: bool | None = None  # type: ignore[assignment] # null is the SDK's way to say nothing


class Tool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    function: ToolFunction

    def to_wire(self) -> wire.Tool:
        function = self.function
        return wire.Tool(
            name=function.name,
            description=function.description,
            parameters=function.parameters,
            strict=bool(function.strict),
        )


def _to_wire(call: GivenToolCall) -> wire.ToolCall:
    """Raises ValueError."""
    arguments = call.function.arguments
    if isinstance(arguments, dict):
        return wire.ToolCall(id=call.id, name=call.function.name, arguments=arguments)
    try:
        decoded = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"`arguments` of the call of {call.function.name[:80]!r} is no JSON object: {error}") from None
    return wire.ToolCall(id=call.id, name=call.function.name, arguments=decoded)
