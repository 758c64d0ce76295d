"""Read the turns of a conversation and their content blocks, and translate them to wire messages. Pure."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects.images import from_base64, join, to_image
from scorepool.wire.chat import check_json
from scorepool.wire.request_fields import MAX_TOOL_CALLS, Text

MAX_BLOCKS = 4096  # of one turn
MAX_MESSAGES = 1024  # of a job
MAX_STRING_LENGTH = 2**28  # of an image


class CacheControl(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ask for the prompt up to here to be cached. Has no effect: prefixes are cached whether or not it is given."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="text", tag_field="type"):
    """Give a text."""

    text: Text
    citations: Annotated[list[str], Meta(max_length=0)] | None = None
    cache_control: CacheControl | None = None


class Base64Source(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="base64", tag_field="type"):
    """Give an image's file."""

    data: Annotated[str, Meta(max_length=MAX_STRING_LENGTH, description="Base64.")]
    media_type: Annotated[
        Literal["image/jpeg", "image/png", "image/gif", "image/webp"],
        Meta(description="Has no effect: the file says what it is."),
    ]

    def to_image(self) -> wire.Image:
        """Return the image. Raises ValueError."""
        return from_base64(self.data, "in `data`")


class UrlSource(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="url", tag_field="type"):
    """Say where an image is."""

    url: Annotated[str, Meta(max_length=MAX_STRING_LENGTH)]

    def to_image(self) -> wire.Image:
        """Return the image. Raises ValueError."""
        return to_image(self.url)


class ImageBlock(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True, tag="image", tag_field="type"
):
    """Show an image."""

    source: Base64Source | UrlSource
    cache_control: CacheControl | None = None

    def __post_init__(self) -> None:
        self.image  # noqa: B018 - decoded once, when the block is read

    @cached_property
    def image(self) -> wire.Image:
        """The image. Raises ValueError."""
        return self.source.to_image()


class ThinkingBlock(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="thinking", tag_field="type"):
    """Send back what the model reasoned in an earlier answer."""

    thinking: Text
    signature: Annotated[str, Meta(description="Has no effect here.")] = ""


class ToolUseBlock(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="tool_use", tag_field="type"):
    """Send back a call of an earlier answer."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None

    def __post_init__(self) -> None:
        check_json(self.input, "the values of `input`")


class ToolResultBlock(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="tool_result", tag_field="type"
):
    """Give the result of a call."""

    tool_use_id: Annotated[str, Meta(min_length=1, max_length=256)]
    content: Text | Annotated[list[TextBlock | ImageBlock], Meta(max_length=MAX_BLOCKS)] | None = None
    is_error: Annotated[
        bool | None, Meta(description="Has no effect here, because chat templates do not show it: `content` says it.")
    ] = None
    cache_control: CacheControl | None = None


Texts = Annotated[list[TextBlock], Meta(max_length=MAX_BLOCKS)]
Block = TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
# The blocks that a turn may have, by its role.
_BLOCKS: dict[str, tuple[type[Struct], ...]] = {
    "user": (TextBlock, ImageBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


class Turn(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Give one turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Meta(max_length=MAX_BLOCKS)]

    def __post_init__(self) -> None:
        for index, block in enumerate(() if isinstance(self.content, str) else self.content):
            if not isinstance(block, _BLOCKS[self.role]):
                expected = " or ".join(str(each.__struct_config__.tag) for each in _BLOCKS[self.role])
                raise ValueError(f"`content[{index}].type` must be {expected} in a turn of the {self.role}")
        if sum(isinstance(block, ToolUseBlock) for block in self.content) > MAX_TOOL_CALLS:
            raise ValueError(f"`content` has more than {MAX_TOOL_CALLS} calls")


def to_messages(system: str | Sequence[TextBlock] | None, turns: Sequence[Turn]) -> list[wire.Message]:
    """Translate the system prompt and the turns. Raise wire.Invalid for more messages than a job may have."""
    messages = [] if not system else [wire.Message(role="system", content=_joined(system)[0])]
    for turn in turns:
        messages += [_to_answer(turn)] if turn.role == "assistant" else _to_given(turn)
    if len(messages) > MAX_MESSAGES:
        sentence = f"expected at most {MAX_MESSAGES}, found {len(messages)} with those that tool results become"
        raise wire.Invalid(f"messages: {sentence}", "messages")
    return messages


def _joined(content: str | Sequence[TextBlock | ImageBlock] | None) -> tuple[str, list[wire.Image]]:
    """Return text and images of blocks, joined without a separator as the parts of OpenAI's messages are."""
    if isinstance(content, str):
        return content, []
    return join(block.image if isinstance(block, ImageBlock) else block.text for block in content or ())


def _to_given(turn: Turn) -> Iterator[wire.Message]:
    """Yield the messages of a turn that is not the model's: a result of a tool is a message of its own."""
    role: Literal["system", "user"] = "system" if turn.role == "system" else "user"
    if isinstance(turn.content, str):
        yield wire.Message(role=role, content=turn.content)
        return
    shown: list[TextBlock | ImageBlock] = []
    for block in turn.content:
        if isinstance(block, TextBlock | ImageBlock):
            shown.append(block)
        elif isinstance(block, ToolResultBlock):
            if shown:
                yield _message(role, shown)
                shown = []
            yield _message("tool", block.content, tool_call_id=block.tool_use_id)
    if shown or not turn.content:
        yield _message(role, shown)


def _message(
    role: Literal["system", "user", "tool"], content: str | Sequence[TextBlock | ImageBlock] | None, **fields: Any
) -> wire.Message:
    text, images = _joined(content)
    return wire.Message(role=role, content=text, images=images, **fields)


def _to_answer(turn: Turn) -> wire.Message:
    """Return the message of an earlier answer."""
    blocks = [TextBlock(text=turn.content)] if isinstance(turn.content, str) else turn.content
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    reasoning = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    return wire.Message(
        role="assistant",
        content="".join(block.text for block in blocks if isinstance(block, TextBlock)),
        reasoning_content=reasoning or None,
        tool_calls=[wire.ToolCall(id=call.id, name=call.name, arguments=call.input) for call in calls],
    )
