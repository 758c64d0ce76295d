"""Define chats: messages, the functions that the model may call, and the calls that it made."""

from collections.abc import Collection, Iterable
from math import isfinite
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, msgpack

from scorepool.wire.image import Images, check_places
from scorepool.wire.quote import quote
from scorepool.wire.request_fields import MAX_DEPTH, MAX_TOOL_CALLS, Text


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Repeat a tool call that the assistant made earlier in the chat."""

    id: str
    name: str
    arguments: dict[str, Any]

    def __post_init__(self) -> None:
        check_json(self.arguments, f"the arguments of the call of {quote(self.name)}")


STRICT = (
    "The arguments of calls follow `parameters`. If any tool is strict, the arguments of every call are constrained."
)


class Tool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Define a function that the model may call."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$(?!\n)")]
    description: Text | None = None
    parameters: Annotated[dict[str, Any], Meta(description="JSON Schema of an object.")] | None = None
    strict: Annotated[bool, Meta(description=STRICT)] = False

    def __post_init__(self) -> None:
        check_json(self.parameters, f"the parameters of {quote(self.name)}")


def check_json(value: object, name: str) -> None:
    """Check a value of any shape: JSON that is not nested deeply, with integers that msgpack can hold.

    Templates, grammars and encoders follow it by recursion. Raises ValueError.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for one in level for inner in _inner(one, name)]
        if not level:
            break
    else:
        raise ValueError(f"{name} are nested more than {MAX_DEPTH} deep")
    try:
        msgpack.encode(value)
    except OverflowError:
        raise ValueError(f"{name} hold an integer of more than 64 bits") from None


def _inner(value: object, name: str) -> Collection[object]:
    """Return the values in a list or an object. Raises ValueError for what JSON does not have."""
    match value:
        case dict():
            if not all(isinstance(key, str) for key in value):
                raise ValueError(f"{name} hold an object whose keys are not all strings")
            return value.values()
        case list():
            return value
        case None | str() | int():
            return ()
        case float() if isfinite(value):
            return ()
        case _:
            raise ValueError(f"{name} hold a {type(value).__name__} that JSON cannot hold")


class Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Give one message of a chat, as the chat template sees it. A template may ignore all fields after `content`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text
    reasoning_content: Text | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOL_CALLS)] = []
    images: Images = []

    def __post_init__(self) -> None:
        if self.images and self.role not in ("user", "tool"):
            raise ValueError(f"`images` belong to messages of the user and of tools, found one of role {self.role}")
        check_places(self.images, self.content, "content")


def check_num_calls(numbers: Iterable[int], field: str = "messages") -> None:
    """Check how many tool calls a chat has, given those of each message; raise ValueError if they are too many."""
    num_calls = sum(numbers)
    if num_calls > MAX_TOOL_CALLS:
        raise ValueError(f"`{field}` has {num_calls} tool calls in all; expected at most {MAX_TOOL_CALLS}")
