"""`/v1/chat/completions`: one wire.Generate, and one choice a sequence of its result. Pure."""

import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

import wire
from api.openai.growing import Piece
from api.openai.sampling import SamplingRequest, Usage, sampled, system_fingerprint, usage_of
from api.openai.spelling import content_bytes, spelled
from wire.request import Text

ROLES: dict[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer word for it
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="text"):
    text: Text


class Function(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: Annotated[str, Meta(description="JSON.")]


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One that the assistant made earlier in the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: None = None

    def __post_init__(self) -> None:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message without `tool_calls` needs `content`")
        for call in self.tool_calls or ():
            _to_call(call)


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    type: Annotated[Literal["text"], Meta(description="Constrained formats are not supported.")]


class ChatRequest(SamplingRequest, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=1024)]
    max_tokens: Annotated[int, Meta(ge=1, le=131_072)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=131_072)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[None, Meta(description="Not supported.")] = None
    tool_choice: Annotated[Literal["none"], Meta(description="Tools are not supported.")] | None = None

    def __post_init__(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs`: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("`max_tokens` is the old name of `max_completion_tokens`: give one of them")
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` needs `stream`: true")


class TopLogprob(Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    """`bytes` are those of the content: none of a token that ends the turn, and up to a stop string's beginning."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
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


class Delta(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoiceChunk(Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChoiceChunk]
    usage: Usage | UnsetType | None = UNSET  # with `include_usage`: null but in the last, which has no choices


def to_request(body: ChatRequest, timeout_s: int) -> wire.Generate:
    return wire.Generate(
        **sampled(body, timeout_s),
        messages=[_to_message(message) for message in body.messages],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        n=body.n or 1,
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
    )


def to_chat_completion(body: ChatRequest, result: wire.Result, id: str) -> ChatCompletion:  # noqa: A002
    wants_ids = bool(body.return_token_ids)
    return ChatCompletion(
        id=id,
        created=int(time.time()),
        model=body.model,
        choices=[
            ChatChoice(
                index=index,
                message=AnswerMessage(content=scored.text),
                logprobs=ChatLogprobs(content=_entries(body, scored, content_bytes(scored))) if body.logprobs else None,
                finish_reason=scored.finish_reason or "length",
                token_ids=scored.token_ids if wants_ids else UNSET,
            )
            for index, scored in enumerate(result.sequences)
        ],
        usage=usage_of([result]),
        system_fingerprint=system_fingerprint(result.stamp),
        prompt_token_ids=(result.sequences[0].prompt_token_ids or []) if wants_ids else UNSET,
    )


def _to_message(message: ChatMessage) -> wire.Message:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    return wire.Message(
        role=ROLES[message.role],
        content=content or "",
        name=message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=[_to_call(call) for call in message.tool_calls or ()],
    )


def _to_call(call: ToolCall) -> wire.ToolCall:
    """Raises ValueError."""
    try:
        arguments = msgspec.json.decode(call.function.arguments, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"`arguments` of the call of {call.function.name[:80]!r} is no JSON object: {error}") from None
    return wire.ToolCall(id=call.id, name=call.function.name, arguments=arguments)


def opening(index: int) -> ChatChoiceChunk:
    """The first chunk of a choice."""
    return ChatChoiceChunk(index=index, delta=Delta(role="assistant", content=""), logprobs=None, finish_reason=None)


def to_chunk(body: ChatRequest, piece: Piece) -> ChatChoiceChunk:
    return ChatChoiceChunk(
        index=piece.index,
        delta=Delta(content=piece.text),
        logprobs=ChatLogprobs(content=_entries(body, piece.scored, piece.contents)) if body.logprobs else None,
        finish_reason=piece.finish_reason,
        token_ids=piece.scored.token_ids if body.return_token_ids else UNSET,
    )


def _entries(body: ChatRequest, scored: wire.Scored, pieces: list[bytes]) -> list[TokenLogprob]:
    as_ids = bool(body.return_tokens_as_token_ids)
    assert scored.logprobs is not None
    entries = []
    columns = zip(scored.token_ids, scored.token_bytes, pieces, scored.logprobs.values(), strict=True)
    for entry, (token_id, piece, kept, logprob) in enumerate(columns):
        assert logprob is not None
        entries.append(
            TokenLogprob(
                token=spelled(token_id, piece, as_ids),
                logprob=logprob,
                bytes=list(kept),
                top_logprobs=_tops(scored, entry, as_ids),
            )
        )
    return entries


def _tops(scored: wire.Scored, entry: int, as_ids: bool) -> list[TopLogprob]:
    """Likeliest first."""
    if scored.top_ids is None or scored.top_bytes is None or scored.top_logprobs is None:
        return []
    columns = zip(scored.top_ids[entry], scored.top_bytes[entry], scored.top_logprobs[entry].values(), strict=True)
    return [
        TopLogprob(token=spelled(token_id, piece, as_ids), logprob=value, bytes=list(piece))
        for token_id, piece, value in columns
        if value is not None
    ]
