"""Read the body of `/v1/responses`, and translate it to one wire.Generate. Pure.

A response that is kept is continued by its id (responses_kept.py). Else a client sends the whole conversation with each
request, as the items of earlier answers.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from scorepool import wire
from scorepool.api.dialects.fields import map_field
from scorepool.api.dialects.images import join, to_image
from scorepool.api.dialects.openai.messages import (
    MAX_PARTS,
    ROLES,
    FunctionDefinition,
    ImageDetail,
    ImageString,
    PastFunctionCall,
)
from scorepool.api.dialects.openai.sampling import Label, NoEffect, SamplingRequest, sampling_fields
from scorepool.api.dialects.openai.structured_outputs import JsonObjectFormat, NamedSchema, TextFormat
from scorepool.api.dialects.unsupported import check_supported
from scorepool.wire.batch import Metadata
from scorepool.wire.chat import check_num_calls
from scorepool.wire.request_fields import MAX_NUM_TOKENS, TemplateKwargs, Text

MAX_ITEMS = 4096
MAX_MESSAGES = 1024  # of a job
LOGPROBS = "message.output_text.logprobs"
_ANSWERED_ID = re.compile(r"(msg|rs|fc)_(?P<response>[0-9a-f]{32})_[0-9]{1,6}")  # as ResponseWriter gives them
_field_name = map_field(
    {
        "json_schema": "text.format",
        "max_tokens": "max_output_tokens",
        "chat_template_kwargs.reasoning_effort": "reasoning.effort",
        "allowed_tools": "tool_choice",
        "targets": "logprob_token_ids",
    }
)
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
# The one value that is supported, by field.
_SUPPORTED = {"n": 1, "return_token_ids": False, "return_tokens_as_token_ids": False}


class ContentPart(Struct, frozen=True, kw_only=True, dict=True):
    """Give a part of an item's content. Unknown fields are ignored, as `annotations` of an earlier answer."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text", "refusal", "input_image"]
    text: Text | None = None
    refusal: Text | None = None
    image_url: ImageString | None = None
    detail: ImageDetail = None
    file_id: Annotated[None, Meta(description="Files are no images here: give `image_url`.")] = None

    def __post_init__(self) -> None:
        field = {"refusal": "refusal", "input_image": "image_url"}.get(self.type, "text")
        if getattr(self, field) is None:
            raise ValueError(f"a part of type {wire.quote(self.type)} needs `{field}`")
        try:
            self.piece  # noqa: B018 - decoded once, when the part is read
        except ValueError as error:
            raise ValueError(f"`image_url`: {error}") from None

    @cached_property
    def piece(self) -> str | wire.Image:
        """The text, the refusal that stands for it, or the image."""
        if self.type == "input_image":
            return to_image(self.image_url or "")
        return (self.refusal if self.type == "refusal" else self.text) or ""


Role = Literal["system", "developer", "user", "assistant"]
Parts = Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)]
Content = Text | Parts


class InputItem(Struct, frozen=True, kw_only=True):
    """Give one item of the conversation: a message, a call of an earlier answer, its output, or reasoning.

    Unknown fields are ignored: clients send back the items of earlier answers as they came.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = "message"
    id: Annotated[str | None, Meta(description="The item of a kept response that a reference stands for.")] = None
    role: Annotated[
        Literal["system", "developer", "user", "assistant"] | None, Meta(description="The author of a message.")
    ] = None
    content: Annotated[Content | None, Meta(description="The text of a message or of reasoning.")] = None
    summary: Annotated[Parts | None, Meta(description="The text of reasoning that has no `content`.")] = None
    call_id: Annotated[str | None, Meta(description="Names a call, and belongs to its output.")] = None
    name: Annotated[str | None, Meta(description="Names the function that was called.")] = None
    arguments: Annotated[
        str | dict[str, Any] | None, Meta(description="The arguments of a call: JSON, or the object.")
    ] = None
    output: Annotated[Content | None, Meta(description="The output of a call.")] = None

    def __post_init__(self) -> None:
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
            "item_reference": ("id",),
        }
        for name in needed[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"an item of type {wire.quote(self.type)} needs `{name}`")
        for name in ("content", "summary", "output"):
            if _has_images(getattr(self, name)) and not self._may_show(name):
                raise ValueError(f"`{name}` has an input_image; expected them in messages of the user and in `output`")
        if self.type == "function_call":
            assert self.name is not None
            assert self.arguments is not None
            call = PastFunctionCall(name=self.name, arguments=self.arguments)
            force_setattr(self, "arguments", call.arguments)

    def _may_show(self, name: str) -> bool:
        if self.type == "function_call_output":
            return name == "output"
        return self.type == "message" and self.role == "user" and name == "content"


class FunctionTool(FunctionDefinition, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=False):
    """Offer a function that the answer may call. A response repeats all fields: Open Responses requires them."""

    type: Literal["function"]

    def to_wire(self) -> wire.Tool:
        """Translate the function."""
        return wire.Tool(
            name=self.name, description=self.description, parameters=self.parameters, strict=bool(self.strict)
        )


class FunctionName(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="function"):
    """Name one of the `tools`: as a choice, ask for one call of it."""

    name: str


class AllowedFunctions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="allowed_tools"):
    """Allow calls of some of the `tools` only; with `required`, one must be called. The model sees all of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionName], Meta(min_length=1, max_length=128)]


ToolChoice = Literal["none", "auto", "required"] | FunctionName | AllowedFunctions


class SchemaFormat(NamedSchema, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="json_schema"):
    """Ask for JSON that follows a schema."""


class TextOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choose the form of the answer."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The schema that the answer must follow; None leaves it free."""
        if isinstance(self.format, SchemaFormat):
            return self.format.schema
        return {"type": "object"} if isinstance(self.format, JsonObjectFormat) else None


class ReasoningOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Say how much a model that reasons does so."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: NoEffect[Literal["auto", "concise", "detailed"]] | None = None
    generate_summary: NoEffect[Literal["auto", "concise", "detailed"]] | None = None


class ResponseRequest(SamplingRequest, frozen=True, kw_only=True):
    """Answer a conversation. A field that is null has its default."""

    logprobs_switch: ClassVar[str] = f'"{LOGPROBS}" in `include`'
    input: Text | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_ITEMS)]
    instructions: Annotated[Text | None, Meta(description="The system message, before `input`.")] = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_NUM_TOKENS)] | None = None
    include: (
        Annotated[
            list[Included],
            Meta(max_length=16, description=f"`{LOGPROBS}`: the tokens with logprobs. Reasoning always comes as text."),
        ]
        | None
    ) = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="false: an answer holds at most one call.")] = None
    chat_template_kwargs: TemplateKwargs | None = None
    previous_response_id: (
        Annotated[
            str,
            Meta(max_length=64, description="The response to continue: its input and its answer come before `input`."),
        ]
        | None
    ) = None
    conversation: Annotated[None, Meta(description="Not kept: send its items in `input`.")] = None
    prompt: None = None
    background: Annotated[
        bool | None,
        Meta(description="Answer at once: `GET /v1/responses/{id}` has the answer when it is there, or streams it."),
    ] = None
    store: Annotated[
        bool | None, Meta(description="false: the response cannot be read or continued by its id. null is true.")
    ] = None
    truncation: (
        Annotated[
            Literal["disabled", "auto"],
            Meta(description="auto: of a conversation that does not fit into the context, the last tokens are kept."),
        ]
        | None
    ) = None
    max_tool_calls: NoEffect[Annotated[int, Meta(ge=1, le=2**31 - 1)]] | None = None
    metadata: Metadata | None = None
    service_tier: NoEffect[Literal["auto", "default", "flex", "priority"]] | None = None
    prompt_cache_key: NoEffect[Label] | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    safety_identifier: NoEffect[Label] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_supported(self, _SUPPORTED)
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            raise ValueError("`stream_options.continuous_usage_stats` is not supported here, expected false")
        if self.background and self.store is False:
            raise ValueError("`store` must be true with `background`")
        if not isinstance(self.input, str):
            check_num_calls((item.type == "function_call" for item in self.input), "input")
        if self.top_logprobs and not self.has_logprobs:
            raise ValueError(f'`top_logprobs` needs "{LOGPROBS}" in `include`')
        effort = self.reasoning.effort if self.reasoning else None
        if effort is not None and "reasoning_effort" in (self.chat_template_kwargs or {}):
            raise ValueError("`reasoning.effort` is in `chat_template_kwargs` too: give one of them")
        if self.json_schema is not None and (self.ignore_eos or self.min_tokens):
            raise ValueError("`text.format` ends the answer: it goes with neither `ignore_eos` nor `min_tokens`")
        if self.tool_choice not in (None, "auto", "none") and not self.tools:
            raise ValueError("`tool_choice` needs `tools`")
        offered = {tool.name for tool in self.tools or ()}
        for name in self.allowed_tools:
            if name not in offered:
                raise ValueError(f"`tool_choice` names {wire.quote(name)}, which is none of the `tools`")

    @property
    def has_token_logprobs(self) -> bool:
        """True if the answer has the logprobs of its tokens."""
        return LOGPROBS in (self.include or ())

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The schema that the answer must follow; None leaves it free."""
        return self.text.json_schema if self.text else None

    @property
    def template_kwargs(self) -> TemplateKwargs:
        """The variables of the chat template that the body sets."""
        effort = self.reasoning.effort if self.reasoning else None
        return {**(self.chat_template_kwargs or {}), **({} if effort is None else {"reasoning_effort": effort})}

    @property
    def allowed_tools(self) -> list[str]:
        """The names of the tools that may be called; an empty list allows all."""
        match self.tool_choice:
            case FunctionName():
                return [self.tool_choice.name]
            case AllowedFunctions():
                return [tool.name for tool in self.tool_choice.tools]
            case _:
                return []


def field_name(field: str) -> str:
    """Map a field of the job to one of the body. Items and messages have no common numbers."""
    return "input" if field.startswith("messages") else _field_name(field)


def to_request(body: ResponseRequest, timeout_s: int) -> wire.Generate:
    """Build the job of a response, which may run for `timeout_s`."""
    return wire.Generate(
        **sampling_fields(body, timeout_s),
        messages=to_messages(body),
        tools=[tool.to_wire() for tool in body.tools or ()],
        tool_choice=_tool_choice_mode(body.tool_choice),
        allowed_tools=body.allowed_tools,
        parallel_tool_calls=body.parallel_tool_calls is not False and not isinstance(body.tool_choice, FunctionName),
        chat_template_kwargs=body.template_kwargs,
        json_schema=body.json_schema,
        truncate="left" if body.truncation == "auto" else None,
        max_tokens=body.max_output_tokens,
        logprobs=body.has_logprobs,
        top_logprobs=0 if body.logprob_token_ids else body.top_logprobs or 0,
    )


def to_messages(body: ResponseRequest) -> list[wire.Message]:
    """Translate instructions and items to messages.

    The items of one answer come apart: its reasoning, its texts and each of its calls. Templates want one message.
    Raise wire.Invalid for more messages than a job may have.
    """
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages: list[wire.Message | _Answer] = []
    if body.instructions is not None:
        messages.append(wire.Message(role="system", content=body.instructions))
    answer: _Answer | None = None  # the last message, while items may still belong to it
    for number, item in enumerate(items):
        if item.type in ("reasoning", "function_call") or item.role == "assistant":
            if answer is None or not _continues(answer, items[number - 1], item):
                answer = _Answer()
                messages.append(answer)
            answer.add(item)
            continue
        answer = None
        if item.type == "function_call_output":
            text, images = _joined(item.output)
            messages.append(wire.Message(role="tool", content=text, images=images, tool_call_id=item.call_id))
        else:
            assert item.role is not None
            text, images = _joined(item.content)
            messages.append(wire.Message(role=ROLES[item.role], content=text, images=images))
    if len(messages) > MAX_MESSAGES:
        raise wire.Invalid(f"input: expected items of at most {MAX_MESSAGES} messages, found {len(messages)}", "input")
    return [each.to_wire() if isinstance(each, _Answer) else each for each in messages]


class _Answer:
    """The items of one answer."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []  # no string of these lists is empty
        self.texts: list[str] = []
        self.calls: list[wire.ToolCall] = []

    def add(self, item: InputItem) -> None:
        match item.type:
            case "reasoning":
                self.reasoning += filter(None, [_string(item.content or item.summary or "")])
            case "function_call":
                assert isinstance(item.arguments, dict)
                assert item.name is not None
                self.calls.append(wire.ToolCall(id=item.call_id or "", name=item.name, arguments=item.arguments))
            case _:
                self.texts += filter(None, [_string(item.content)])

    def to_wire(self) -> wire.Message:
        """Build the message that has all items."""
        return wire.Message(
            role="assistant",
            content="".join(self.texts),
            reasoning_content="".join(self.reasoning) or None,
            tool_calls=self.calls,
        )


def _continues(answer: _Answer, last: InputItem, item: InputItem) -> bool:
    """True if the item is of the answer that has the item before it, `last`.

    The ids that responses gave them say it. Without these, reasoning comes first, then text, then calls, and no other
    answer begins before the calls have their outputs.
    """
    matches = [_ANSWERED_ID.fullmatch(each.id or "") for each in (last, item)]
    if all(matches):
        return len({match["response"] for match in matches if match}) == 1
    if item.type == "function_call" or answer.calls:
        return True
    return not answer.texts and (item.type == "message" or not answer.reasoning)


def _has_images(content: str | Sequence[ContentPart] | None) -> bool:
    return any(part.type == "input_image" for part in content or () if not isinstance(part, str))


def _joined(content: str | Sequence[ContentPart] | None) -> tuple[str, list[wire.Image]]:
    return (content, []) if isinstance(content, str) else join(part.piece for part in content or ())


def _string(content: str | Sequence[ContentPart] | None) -> str:
    return _joined(content)[0]


def _tool_choice_mode(choice: ToolChoice | None) -> Literal["none", "auto", "required"]:
    match choice:
        case FunctionName():
            return "required"
        case AllowedFunctions():
            return choice.mode
        case _:
            return choice or "auto"
