"""`/v1/chat/completions`: one wire.Generate, and one choice a sequence of its result. Pure."""

import time
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from scorepool import wire
from scorepool.api.dialects.fields import in_words
from scorepool.api.dialects.openai.choice_stream import ChoiceStream, Delta
from scorepool.api.dialects.openai.detokenizer import token_text
from scorepool.api.dialects.openai.messages import ChatMessage, Function, Tool, ToolCall
from scorepool.api.dialects.openai.sampling import (
    Metadata,
    NoEffect,
    SamplingRequest,
    Usage,
    sampled,
    system_fingerprint,
    usage_of,
)
from scorepool.api.dialects.openai.structured_outputs import (
    FunctionName,
    ResponseFormat,
    ToolChoice,
    chosen,
    mode_of,
    schema_of,
)
from scorepool.api.dialects.unsupported import check_only
from scorepool.wire.request import TemplateKwargs

FinishReason = Literal["stop", "length", "tool_calls"]
to_param = in_words(
    {
        "json_schema": "response_format",
        "chat_template_kwargs.reasoning_effort": "reasoning_effort",
        "allowed_tools": "tool_choice",
    }
)
_ONLY = {
    "store": False,
    "echo": False,
    "add_special_tokens": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
}


class ChatRequest(SamplingRequest, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=1024)]
    max_tokens: Annotated[int, Meta(ge=1, le=131_072)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=131_072)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="false: an answer holds at most one call.")] = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    modalities: Annotated[list[Literal["text"]], Meta(min_length=1)] | None = None
    moderation: None = None
    prediction: None = None
    web_search_options: None = None
    verbosity: Literal["medium"] | None = None
    store: bool | None = None
    metadata: NoEffect[Metadata] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: NoEffect[str] | None = None
    prompt_cache_options: None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    safety_identifier: NoEffect[str] | None = None
    echo: bool | None = None
    add_special_tokens: Annotated[bool | None, Meta(description="The template writes them.")] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    skip_special_tokens: (
        Annotated[bool, Meta(description="True where it is null: those that part no channels are in none.")] | None
    ) = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_only(self, _ONLY)
        if self.top_logprobs and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs`: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("`max_tokens` is the old name of `max_completion_tokens`: give one of them")
        if self.reasoning_effort is not None and "reasoning_effort" in (self.chat_template_kwargs or {}):
            raise ValueError("`reasoning_effort` is in `chat_template_kwargs` too: give one of them")
        if self.num_most_tokens is not None and (self.min_tokens or 0) > self.num_most_tokens:
            raise ValueError(f"`min_tokens` must be at most `max_completion_tokens`, {self.num_most_tokens}")
        if schema_of(self.response_format) is not None and (self.ignore_eos or self.min_tokens):
            raise ValueError("`response_format` ends the answer: it goes with neither `ignore_eos` nor `min_tokens`")
        if self.tool_choice not in (None, "auto", "none") and not self.tools:
            raise ValueError("`tool_choice` needs `tools`")
        offered = {tool.function.name for tool in self.tools or ()}
        for name in chosen(self.tool_choice):
            if name not in offered:
                raise ValueError(f"`tool_choice` names {name[:80]!r}, which is none of the `tools`")

    @property
    def num_most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class TopLogprob(Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    """`bytes` are what the token adds to its channel: nothing of markup, and up to where a stop string begins."""

    top_logprobs: list[TopLogprob]
    channel: wire.Channel


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """One entry for every token that was generated, in that order, whatever its channel."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(Struct, frozen=True, kw_only=True):
    """The last two are there when the model reasoned, or called functions."""

    role: Literal["assistant"] = "assistant"
    content: str | None  # null where it only called functions
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None  # which of `stop_token_ids` or `stop` it was
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_token_ids: list[int] | UnsetType = UNSET


class ToolCallDelta(ToolCall, frozen=True, kw_only=True):
    """A whole call: its tokens are held back until it can be read."""

    index: int


class ChatDelta(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoiceChunk(Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET  # of the last
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChoiceChunk]
    # With `include_usage`: null but in the last, which has no choices; with `continuous_usage_stats` as it is so far.
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # beside a finish_reason


def _template_kwargs(body: ChatRequest) -> TemplateKwargs:
    """`reasoning_effort` is the variable of that name, as in vLLM."""
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return {**(body.chat_template_kwargs or {}), **effort}


def to_request(body: ChatRequest, timeout_s: int) -> wire.Generate:
    return wire.Generate(
        **sampled(body, timeout_s),
        messages=[message.to_wire() for message in body.messages],
        tools=[tool.to_wire() for tool in body.tools or ()],
        tool_choice=mode_of(body.tool_choice),
        allowed_tools=chosen(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False and not isinstance(body.tool_choice, FunctionName),
        chat_template_kwargs=_template_kwargs(body),
        json_schema=schema_of(body.response_format),
        max_tokens=body.num_most_tokens,
        skip_special_tokens=False if body.skip_special_tokens is False else None,
        n=body.n or 1,
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
    )


def to_chat_completion(body: ChatRequest, result: wire.Result, id: str) -> ChatCompletion:  # noqa: A002
    """Each choice is a stream's of one piece."""
    pieces = [ChoiceStream(index).end(scored) for index, scored in enumerate(result.sequences)]
    return ChatCompletion(
        id=id,
        created=int(time.time()),
        model=body.model,
        choices=[_to_choice(body, piece) for piece in pieces],
        usage=usage_of([result]),
        system_fingerprint=system_fingerprint(result.stamp),
        prompt_token_ids=(result.sequences[0].prompt_token_ids or []) if body.return_token_ids else UNSET,
    )


def _to_choice(body: ChatRequest, piece: Delta) -> ChatChoice:
    calls = [ToolCall(id=call.id, function=_function(call)) for call in piece.tool_calls]
    return ChatChoice(
        index=piece.index,
        message=AnswerMessage(
            content=None if calls and not piece.text else piece.text,
            reasoning_content=piece.reasoning or UNSET,
            tool_calls=calls or UNSET,
        ),
        logprobs=ChatLogprobs(content=_entries(body, piece)) if body.logprobs else None,
        finish_reason=_finish_reason(body, piece) or "length",
        stop_reason=piece.stop_reason,
        token_ids=piece.scored.token_ids if body.return_token_ids else UNSET,
    )


def opening(index: int) -> ChatChoiceChunk:
    """The first chunk of a choice."""
    return ChatChoiceChunk(
        index=index, delta=ChatDelta(role="assistant", content=""), logprobs=None, finish_reason=None
    )


def to_chunk(body: ChatRequest, piece: Delta) -> ChatChoiceChunk:
    calls = [
        ToolCallDelta(index=piece.num_calls_before + place, id=call.id, function=_function(call))
        for place, call in enumerate(piece.tool_calls)
    ]
    says_more = bool(piece.reasoning or calls)
    return ChatChoiceChunk(
        index=piece.index,
        delta=ChatDelta(
            content=UNSET if says_more and not piece.text else piece.text,
            reasoning_content=piece.reasoning or UNSET,
            tool_calls=calls or UNSET,
        ),
        logprobs=ChatLogprobs(content=_entries(body, piece)) if body.logprobs else None,
        finish_reason=_finish_reason(body, piece),
        stop_reason=piece.stop_reason if piece.finish_reason else UNSET,
        token_ids=piece.scored.token_ids if body.return_token_ids else UNSET,
    )


def prompt_token_ids(body: ChatRequest, piece: Delta) -> list[int] | UnsetType:
    """Known from the result on."""
    return piece.prompt_token_ids or [] if body.return_token_ids and piece.finish_reason is not None else UNSET


def _function(call: wire.ToolCallResult) -> Function:
    return Function(name=call.name, arguments=call.arguments)


def _finish_reason(body: ChatRequest, piece: Delta) -> FinishReason | None:
    """Where the caller named the function that is called: `stop`, as OpenAI's and vLLM's."""
    has_called = bool(piece.num_calls_before or piece.tool_calls) and not isinstance(body.tool_choice, FunctionName)
    return "tool_calls" if piece.finish_reason == "stop" and has_called else piece.finish_reason


def _entries(body: ChatRequest, piece: Delta) -> list[TokenLogprob]:
    as_ids = bool(body.return_tokens_as_token_ids)
    scored = piece.scored
    assert scored.logprobs is not None
    entries = []
    columns = zip(
        scored.token_ids, scored.token_bytes, piece.contents, scored.logprobs.values(), piece.channels, strict=True
    )
    for entry, (token_id, spelling, kept, logprob, channel) in enumerate(columns):
        assert logprob is not None
        entries.append(
            TokenLogprob(
                token=token_text(token_id, spelling, as_ids),
                logprob=logprob,
                bytes=list(kept),
                top_logprobs=_tops(scored, entry, as_ids),
                channel=channel,
            )
        )
    return entries


def _tops(scored: wire.SequenceResult, entry: int, as_ids: bool) -> list[TopLogprob]:
    """Likeliest first."""
    if scored.top_ids is None or scored.top_bytes is None or scored.top_logprobs is None:
        return []
    columns = zip(scored.top_ids[entry], scored.top_bytes[entry], scored.top_logprobs[entry].values(), strict=True)
    return [
        TopLogprob(token=token_text(token_id, piece, as_ids), logprob=value, bytes=list(piece))
        for token_id, piece, value in columns
        if value is not None
    ]
