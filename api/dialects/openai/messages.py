"""Read the messages of a chat and the tools that an answer may call, and translate them to wire messages. Pure.

OpenAI ignores unknown fields of messages and of their parts, and so does the server: SDKs and gateways send back what
they found in answers (`annotations`, `parsed`), and hints for other servers (`cache_control`).
"""

from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects.images import join, to_image, to_video
from scorepool.wire.chat import STRICT, check_json
from scorepool.wire.image import DEFAULT_FPS, MIN_FPS
from scorepool.wire.request_fields import MAX_TOOL_CALLS, Text

MAX_PARTS = 4096  # of the content of one message
MAX_URL_LENGTH = 2**28
ImageString = Annotated[
    str, Meta(max_length=MAX_URL_LENGTH, description="A data URL: `data:image/png;base64,...`, JPEG, WebP or GIF.")
]
ImageDetail = Annotated[
    Literal["auto", "low", "high", "original"] | None,
    Meta(description="Has no effect: the model's own settings decide about the size."),
]
IMAGE_ROLES = ("user", "tool")
ROLES: dict[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name of the role
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class TextPart(Struct, frozen=True, kw_only=True, tag="text", tag_field="type"):
    """Give a text as a part of a message's content."""

    text: Text


class ImageUrl(Struct, frozen=True, kw_only=True, dict=True):
    """Give an image."""

    url: ImageString
    detail: ImageDetail = None

    def __post_init__(self) -> None:
        self.image  # noqa: B018 - decoded once, when the URL is read

    @cached_property
    def image(self) -> wire.Image:
        """The image. Raises ValueError."""
        return to_image(self.url)


class ImagePart(Struct, frozen=True, kw_only=True, tag="image_url", tag_field="type"):
    """Show an image as a part of a message's content."""

    image_url: ImageUrl


class VideoUrl(Struct, frozen=True, kw_only=True, dict=True):
    """Give a video."""

    url: Annotated[
        str,
        Meta(
            max_length=MAX_URL_LENGTH,
            description="A data URL of its frames, as vLLM's clients write it: `data:video/jpeg;base64,...,...`; or of "
            "its file: `data:video/mp4;base64,...`, or webm.",
        ),
    ]
    fps: (
        Annotated[
            float,
            Meta(
                ge=MIN_FPS,
                le=1000,
                description=f"Frames of a second; of a file, those that are sampled. null: {DEFAULT_FPS:g}.",
            ),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        self.video  # noqa: B018 - decoded once, when the URL is read

    @cached_property
    def video(self) -> wire.Image:
        """The video. Raises ValueError."""
        return to_video(self.url, self.fps)


class VideoPart(Struct, frozen=True, kw_only=True, tag="video_url", tag_field="type"):
    """Show a video as a part of a message's content."""

    video_url: VideoUrl


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
        name = f"`arguments` of the call of {wire.quote(self.name)}"
        if isinstance(self.arguments, str):
            try:
                decoded = msgspec.json.decode(self.arguments or "{}", type=dict[str, Any])
            except (msgspec.DecodeError, RecursionError) as error:
                raise ValueError(f"{name} is no JSON object: {error}") from None
            msgspec.structs.force_setattr(self, "arguments", decoded)
        check_json(self.arguments, name)


class PastToolCall(Struct, frozen=True, kw_only=True):
    """Send back a call of an earlier answer, as the SDK does."""

    id: str
    type: Literal["function"] = "function"
    function: PastFunctionCall


class ChatMessage(Struct, frozen=True, kw_only=True):
    """Give one message of the chat. Unknown fields are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Text
        | Annotated[
            list[TextPart | ImagePart | VideoPart],
            Meta(max_length=MAX_PARTS),
        ]
        | None
    ) = None
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
        has_images = isinstance(self.content, list) and any(not isinstance(part, TextPart) for part in self.content)
        if has_images and self.role not in IMAGE_ROLES:
            raise ValueError(
                f"`content` of role {self.role} has an image; expected them in those of the user and tools"
            )

    def to_wire(self) -> wire.Message:
        """Translate the message."""
        content = self.refusal if self.content is None else self.content
        images: list[wire.Image] = []
        if isinstance(content, list):
            content, images = join(map(_piece, content))
        return wire.Message(
            role=ROLES[self.role],
            content=content or "",
            reasoning_content=self.reasoning_content,
            name=self.name,
            tool_call_id=self.tool_call_id,
            tool_calls=[_to_wire_call(call) for call in self.tool_calls or ()],
            images=images,
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


def _piece(part: TextPart | ImagePart | VideoPart) -> str | wire.Image:
    match part:
        case ImagePart():
            return part.image_url.image
        case VideoPart():
            return part.video_url.video
        case _:
            return part.text


def _to_wire_call(call: PastToolCall) -> wire.ToolCall:
    assert isinstance(call.function.arguments, dict)
    return wire.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
