"""Define the replies of `/v1/responses`: a response with its output items, and the events of a stream. Data only."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from scorepool.api.dialects.openai.chat_reply import TokenLogprob
from scorepool.api.dialects.openai.responses import FunctionTool, ReasoningOptions, TextOptions, ToolChoice
from scorepool.api.dialects.openai.sampling import DraftLogprobsIfAsked, ModeIfLogprobs
from scorepool.api.dialects.weights import WeightsVersion
from scorepool.wire.batch import BatchUsage, Metadata
from scorepool.wire.reply import ErrorBody

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, frozen=True, kw_only=True, tag="output_text"):
    """Give the text of an answer."""

    text: str
    annotations: Annotated[list[str], Meta(max_length=0)] = []
    logprobs: Annotated[
        list[TokenLogprob],
        Meta(description="The tokens of the text, if they are in `include`: their `bytes` joined are the text."),
    ] = []


class ReasoningText(Struct, frozen=True, kw_only=True, tag="reasoning_text"):
    """Give the text of a reasoning."""

    text: str


class MessageItem(Struct, frozen=True, kw_only=True, tag="message"):
    """Give the answer of the model."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(Struct, frozen=True, kw_only=True, tag="reasoning"):
    """Give what the model reasoned before its answer."""

    id: str
    status: ItemStatus
    summary: Annotated[list[str], Meta(max_length=0)] = []
    content: list[ReasoningText]
    encrypted_content: None = None


class FunctionCallItem(Struct, frozen=True, kw_only=True, tag="function_call"):
    """Give a call of the answer."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: Annotated[str, Meta(description="JSON.")]


OutputItem = ReasoningItem | MessageItem | FunctionCallItem


class IncompleteDetails(Struct, frozen=True, kw_only=True):
    """Say why an answer ended early."""

    reason: Literal["max_output_tokens"]


class ResponseError(Struct, frozen=True, kw_only=True):
    """Say why a response in the background has no answer."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class ResponseObject(Struct, frozen=True, kw_only=True):
    """Answer a conversation. What the request chose is repeated."""

    id: str
    object: Literal["response"] = "response"
    created_at: Annotated[int, Meta(description="Unix time in seconds.")]
    completed_at: Annotated[None, Meta(description="Not told here: the job has `ended_at`.")] = None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool = False
    error: ResponseError | None = None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: Metadata
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningOptions
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: Annotated[bool, Meta(description="True if the response can be read and continued by its id.")]
    temperature: float
    text: TextOptions
    tool_choice: ToolChoice
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled", "auto"]
    usage: Annotated[BatchUsage | None, Meta(description="null until the end.")] = None
    user: str | None
    logprobs_mode: ModeIfLogprobs = UNSET
    draft_logprobs: DraftLogprobsIfAsked = UNSET
    weights_version: WeightsVersion = UNSET


class ResponseEvent(Struct, frozen=True, kw_only=True):
    """Stream a part of a response. `type` says which of the fields are present."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
    error: Annotated[
        ErrorBody | UnsetType, Meta(description="The same error as an object: some clients read this one.")
    ] = UNSET
