"""Read the body of `/v1/responses/input_tokens`, and translate it to the job that encodes a response's prompt. Pure."""

from functools import cached_property
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import asdict

from scorepool import wire
from scorepool.api.dialects.openai import responses
from scorepool.api.dialects.openai.responses import (
    MAX_ITEMS,
    FunctionTool,
    InputItem,
    ReasoningOptions,
    ResponseRequest,
    TextOptions,
    ToolChoice,
)
from scorepool.api.dialects.openai.sampling import NoEffect
from scorepool.wire.request_fields import ModelName, TemplateKwargs, Text


class InputTokensRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Count the tokens of a response's prompt: its fields that the prompt depends on, and those beside them."""

    model: ModelName
    input: Text | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_ITEMS)]
    instructions: Text | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    previous_response_id: Annotated[str, Meta(max_length=64)] | None = None
    conversation: Annotated[None, Meta(description="Not kept: send its items in `input`.")] = None
    truncation: NoEffect[Literal["disabled", "auto"]] | None = None

    def __post_init__(self) -> None:
        self.response  # noqa: B018 - checked when the body is read

    @cached_property
    def response(self) -> ResponseRequest:
        """The response whose prompt is counted. Raises ValueError."""
        return ResponseRequest(**asdict(self))


class InputTokens(Struct, frozen=True, kw_only=True):
    """Count the tokens of a prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


def to_request(body: ResponseRequest, model: str, timeout_s: int) -> wire.Tokenize:
    """Build the job that encodes the prompt of a response."""
    return wire.Tokenize(
        model=model,
        messages=responses.to_messages(body),
        tools=[tool.to_wire() for tool in body.tools or ()],
        chat_template_kwargs=body.template_kwargs,
        priority="high",
        timeout_s=timeout_s,
    )
