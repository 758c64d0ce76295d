"""Read the messages of a chat and the tools that an answer may call, and translate them to wire messages. Pure.

OpenAI ignores unknown fields of messages and of their parts, and so does the server: SDKs and gateways send back what
they found in answers (`annotations`, `parsed`), and hints for other servers (`cache_control`).
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from scorepool import wire
from scorepool.wire.chat import STRICT
from scorepool.wire.request_fields import MAX_TOOL_CALLS, Text

MAX_PARTS = 4096  # of the content of one message
ROLES: dict[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name of the role
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class TextPart(Struct, frozen=True, kw_only=True):
    """Give a part of a message's content."""

    type: Literal["text"]
    text: Text


class FunctionCall(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Name the function that the model called, and its arguments."""

    name: str
    arguments: Annotated[str, Meta(description="JSON.")]


class ChatToolCall(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Report a call of the answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class PastFunctionCall(Struct, frozen=True, kw_only=True):
    """Name the function of an earlier call, and its arguments. A text is decoded once, when the call is read."""

    name: str
    arguments: Annotated[str | dict[str, Any], Meta(description="JSON, or the object: chat templates need an object.")]

    def __post_init__(self) -> None:
        if not isinstance(self.arguments, str):
            return
        try:
            decoded = msgspec.json.decode(self.arguments or "{}", type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ValueError(f"`arguments` of the call of {wire.quote(self.name)} is no JSON object: {error}") from None
        msgspec.structs.force_setattr(self, "arguments", decoded)


class PastToolCall(Struct, frozen=True, kw_only=True):
    """Send back a call of an earlier answer, as the SDK does."""

    id: str
    type: Literal["function"] = "function"
    function: PastFunctionCall


class ChatMessage(Struct, frozen=True, kw_only=True):
    """Give one message of the chat. Unknown fields are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)] | None = None
    reasoning_content: Annotated[
        Text | None, Meta(description="Sent back from an answer, for templates that show a model its reasoning.")
    ] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[PastToolCall], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    refusal: Annotated[Text | None, Meta(description="Stands for `content` where that is null.")] = None
    audio: None = None
    function_call: None = None

    def __post_init__(self) -> None:
        if self.content is None and self.refusal is None and not self.tool_calls:
            raise ValueError("a message without `tool_calls` needs `content`")
        for call in self.tool_calls or ():
            _to_wire_call(call)

    def to_wire(self) -> wire.Message:
        """Translate the message."""
        content = self.refusal if self.content is None else self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return wire.Message(
            role=ROLES[self.role],
            content=content or "",
            reasoning_content=self.reasoning_content,
            name=self.name,
            tool_call_id=self.tool_call_id,
            tool_calls=[_to_wire_call(call) for call in self.tool_calls or ()],
        )


class FunctionDefinition(wire.Tool, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Define a function. OpenAI's SDK sends null for a `strict` that was not given."""

    strict: Annotated[bool | None, Meta(description=STRICT)] = None  # type: ignore[assignment]


class ChatTool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Offer a function that the answer may call."""

    type: Literal["function"]
    function: FunctionDefinition

    def to_wire(self) -> wire.Tool:
        """Translate the function."""
        function = self.function
        return wire.Tool(
            name=function.name,
            description=function.description,
            parameters=function.parameters,
            strict=bool(function.strict),
        )


def _to_wire_call(call: PastToolCall) -> wire.ToolCall:
    assert isinstance(call.function.arguments, dict)
    return wire.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
