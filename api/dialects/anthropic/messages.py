"""Read the bodies of `/v1/messages` and `/v1/messages/count_tokens`, and translate them to one job. Pure."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects.anthropic.content import CacheControl, Texts, ToolUseBlock, Turn, to_messages
from scorepool.api.dialects.fields import map_field
from scorepool.wire.chat import check_json, check_num_calls
from scorepool.wire.generate import check_speculation
from scorepool.wire.request_fields import (
    MAX_NUM_TOKENS,
    ChosenSpeculation,
    ModelName,
    MostProposedTokens,
    StopStrings,
    Temperature,
    TemplateKwargs,
    Text,
    TopP,
)

NAMES = {
    "json_schema": "output_config.format.schema",
    "stop": "stop_sequences",
    "allowed_tools": "tool_choice",
    "chat_template_kwargs.reasoning_effort": "output_config.effort",
    "chat_template_kwargs.enable_thinking": "thinking",
}
# Fields that this server does not have, with the defaults that pass. Null always passes.
FOREIGN_FIELDS: Mapping[str, object] = {
    "container": None,
    "diagnostics": None,
    "inference_geo": None,
    "mcp_servers": [],
    "speed": "standard",
    "thread": None,
}
Displayed = Annotated[Literal["summarized"] | None, Meta(description="Reasoning is always shown, and whole.")]


class ThinkingEnabled(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="enabled", tag_field="type"):
    """Let the model reason: the variable `enable_thinking` of its chat template is true."""

    budget_tokens: Annotated[
        int, Meta(ge=1, le=MAX_NUM_TOKENS, description="Has no effect here: `max_tokens` counts reasoning too.")
    ]
    display: Displayed = None


class ThinkingAdaptive(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="adaptive", tag_field="type"):
    """Leave it to the model, as without `thinking`."""

    display: Displayed = None


class ThinkingDisabled(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="disabled", tag_field="type"):
    """Let the model answer at once: the variable `enable_thinking` of its chat template is false."""


class JsonFormat(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="json_schema", tag_field="type"):
    """Ask for JSON that follows a schema."""

    schema: Annotated[dict[str, Any], Meta(description="JSON Schema.")]

    def __post_init__(self) -> None:
        check_json(self.schema, "the values of `schema`")


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choose the form of the answer, and how much a model that reasons does so."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class MessageMetadata(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Describe the request. Has no effect here."""

    user_id: str | None = None


class ClearThinking(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="clear_thinking_20251015", tag_field="type"
):
    """Clear no reasoning of earlier turns: all of it is shown to the model, as Claude Code asks."""

    keep: Annotated[Literal["all"], Meta(description="Other turns' reasoning is not cleared here.")]


class ContextManagement(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Change nothing: no edit of a conversation is here but the one that keeps it."""

    edits: Annotated[list[ClearThinking], Meta(max_length=16)] = []


class CustomTool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Offer a function that the answer may call. Tools that a server runs are not here."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$(?!\n)")]
    description: Text | None = None
    input_schema: Annotated[dict[str, Any], Meta(description="JSON Schema of an object.")]
    strict: Annotated[bool | None, Meta(description=wire.chat.STRICT)] = None
    cache_control: CacheControl | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Meta(max_length=1)] | None = None
    eager_input_streaming: Annotated[bool | None, Meta(description="Has no effect: a call is streamed whole.")] = None

    def __post_init__(self) -> None:
        check_json(self.input_schema, f"the input_schema of {wire.quote(self.name)}")

    def to_wire(self) -> wire.Tool:
        """Translate the function."""
        return wire.Tool(
            name=self.name, description=self.description, parameters=self.input_schema, strict=bool(self.strict)
        )


class MessageToolChoice(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Say whether the answer may, must or must not call functions."""

    type: Literal["auto", "any", "none", "tool"]
    name: Annotated[str | None, Meta(description="The function that is called, with `tool`.")] = None
    disable_parallel_tool_use: bool | None = None

    def __post_init__(self) -> None:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError('`name` belongs to the type "tool", which needs it')


class Conversation(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Give a model, a conversation and what its prompt depends on. A field that is null has its default."""

    model: ModelName
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=1024)]
    system: Text | Texts | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=128)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[JsonFormat | None, Meta(description="The earlier name of `output_config.format`.")] = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None

    def __post_init__(self) -> None:
        last = len(self.messages) - 1
        if self.messages[last].role == "assistant":
            raise ValueError(
                f"`messages[{last}].role` of the last turn must be user, because answers that continue a turn of the "
                "assistant are not supported here"
            )
        blocks = [block for turn in self.messages if not isinstance(turn.content, str) for block in turn.content]
        check_num_calls(isinstance(block, ToolUseBlock) for block in blocks)
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise ValueError("`output_format` is the earlier name of `output_config.format`: give one of them")
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool") and not self.tools:
            raise ValueError("`tool_choice` needs `tools`")
        if (
            choice is not None
            and choice.name is not None
            and choice.name not in {tool.name for tool in self.tools or ()}
        ):
            raise ValueError(f"`tool_choice` names {wire.quote(choice.name)}, which is none of the `tools`")

    @property
    def wire_messages(self) -> list[wire.Message]:
        """The messages of the job. Raises wire.Invalid."""
        return to_messages(self.system, self.messages)

    @property
    def wire_tools(self) -> list[wire.Tool]:
        """The tools of the job."""
        return [tool.to_wire() for tool in self.tools or ()]

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The schema that the answer follows."""
        form = self.output_format or (self.output_config and self.output_config.format)
        return form.schema if form else None

    @property
    def template_kwargs(self) -> TemplateKwargs:
        """The variables of the chat template that the body sets."""
        kwargs: TemplateKwargs = {}
        if isinstance(self.thinking, ThinkingEnabled | ThinkingDisabled):
            kwargs["enable_thinking"] = isinstance(self.thinking, ThinkingEnabled)
        if self.output_config is not None and self.output_config.effort is not None:
            kwargs["reasoning_effort"] = self.output_config.effort
        return kwargs


def field_name(body: Conversation, field: str) -> str:
    """Map a field of the job to one of the body. Turns and messages have no common numbers."""
    if field.startswith("messages"):
        return "messages"
    return map_field(NAMES | ({} if body.output_format is None else {"json_schema": "output_format.schema"}))(field)


class CountTokensRequest(Conversation, frozen=True, kw_only=True):
    """Count the tokens of a conversation's prompt."""


class MessagesRequest(Conversation, frozen=True, kw_only=True):
    """Answer a conversation. A field that is null has its default."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_NUM_TOKENS)]
    stop_sequences: StopStrings | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=0, le=1_000_000, description="0 keeps every token.")] | None = None
    stream: bool | None = None
    metadata: MessageMetadata | None = None
    service_tier: Annotated[Literal["auto", "standard_only"] | None, Meta(description="Has no effect here.")] = None
    speculation: ChosenSpeculation | None = None
    speculation_tokens: MostProposedTokens | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_speculation(self.speculation, self.speculation_tokens, include_draft_logprobs=False)


def to_request(body: MessagesRequest, timeout_s: int) -> wire.Generate:
    """Build the job of an answer, which may run for `timeout_s`. It is that of the same chat in OpenAI's dialect."""
    choice = body.tool_choice or MessageToolChoice(type="auto")
    return wire.Generate(
        model=body.model,
        timeout_s=timeout_s,
        messages=body.wire_messages,
        tools=body.wire_tools,
        tool_choice="required" if choice.type in ("any", "tool") else choice.type,  # type: ignore[arg-type]
        allowed_tools=[] if choice.name is None else [choice.name],
        parallel_tool_calls=choice.name is None and not choice.disable_parallel_tool_use,
        chat_template_kwargs=body.template_kwargs,
        json_schema=body.json_schema,
        max_tokens=body.max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        stop=body.stop_sequences or [],
        logprobs=False,
        speculation=body.speculation,
        speculation_tokens=body.speculation_tokens,
        stream=bool(body.stream),
    )


def to_count_request(body: CountTokensRequest, model: str, timeout_s: int) -> wire.Tokenize:
    """Build the job that encodes the prompt of a conversation."""
    return wire.Tokenize(
        model=model,
        messages=body.wire_messages,
        tools=body.wire_tools,
        chat_template_kwargs=body.template_kwargs,
        priority="high",
        timeout_s=timeout_s,
    )
