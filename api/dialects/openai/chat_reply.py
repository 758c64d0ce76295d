"""Replies of `/v1/chat/completions`: one choice per sequence of a result, whole or in chunks. Pure."""

import time
from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from scorepool import wire
from scorepool.api.dialects.deltas import ChoiceStream, Delta
from scorepool.api.dialects.detokenizer import token_text, top_tokens
from scorepool.api.dialects.openai.chat import ChatRequest
from scorepool.api.dialects.openai.chunks import ChunkWriter
from scorepool.api.dialects.openai.messages import Function, ToolCall
from scorepool.api.dialects.openai.sampling import Usage, system_fingerprint, usage_of_results
from scorepool.api.dialects.openai.structured_outputs import FunctionName

FinishReason = Literal["stop", "length", "tool_calls"]


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


def to_chat_completion(body: ChatRequest, result: wire.Result, reply_id: str) -> ChatCompletion:
    """Build the reply. Each choice is a stream of one delta."""
    deltas = [ChoiceStream(index).end(sequence) for index, sequence in enumerate(result.sequences)]
    return ChatCompletion(
        id=reply_id,
        created=int(time.time()),
        model=body.model,
        choices=[_to_choice(body, delta) for delta in deltas],
        usage=usage_of_results([result]),
        system_fingerprint=system_fingerprint(result.stamp),
        prompt_token_ids=(result.sequences[0].prompt_token_ids or []) if body.return_token_ids else UNSET,
    )


class ChatChunkWriter(ChunkWriter[ChatChunk]):
    """Translate the events of a chat's job into ChatChunks."""

    def __init__(self, body: ChatRequest, job_ids: Sequence[str], reply_id: str) -> None:
        super().__init__(body, job_ids)
        self._body = body
        self._reply_id = reply_id

    def opening(self) -> list[ChatChunk]:
        return [self._chunk([opening(index)]) for index in range(self._body.num_choices)]

    def to_chunk(self, delta: Delta) -> ChatChunk:
        return self._chunk([to_chunk(self._body, delta)], _prompt_token_ids(self._body, delta))

    def usage_chunk(self) -> ChatChunk:
        return self._chunk([])

    def _chunk(self, choices: list[ChatChoiceChunk], prompt_token_ids: list[int] | UnsetType = UNSET) -> ChatChunk:
        return ChatChunk(
            id=self._reply_id,
            created=self.created,
            model=self._body.model,
            choices=choices,
            prompt_token_ids=prompt_token_ids,
        )


def opening(index: int) -> ChatChoiceChunk:
    """Build the first chunk of a choice."""
    return ChatChoiceChunk(
        index=index, delta=ChatDelta(role="assistant", content=""), logprobs=None, finish_reason=None
    )


def to_chunk(body: ChatRequest, delta: Delta) -> ChatChoiceChunk:
    calls = [
        ToolCallDelta(index=delta.num_calls_before + offset, id=call.id, function=_function(call))
        for offset, call in enumerate(delta.tool_calls)
    ]
    has_other_channels = bool(delta.reasoning or calls)
    return ChatChoiceChunk(
        index=delta.index,
        delta=ChatDelta(
            content=UNSET if has_other_channels and not delta.text else delta.text,
            reasoning_content=delta.reasoning or UNSET,
            tool_calls=calls or UNSET,
        ),
        logprobs=ChatLogprobs(content=_token_logprobs(body, delta)) if body.logprobs else None,
        finish_reason=_finish_reason(body, delta),
        stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
        token_ids=delta.sequence.token_ids if body.return_token_ids else UNSET,
    )


def _to_choice(body: ChatRequest, delta: Delta) -> ChatChoice:
    calls = [ToolCall(id=call.id, function=_function(call)) for call in delta.tool_calls]
    return ChatChoice(
        index=delta.index,
        message=AnswerMessage(
            content=None if calls and not delta.text else delta.text,
            reasoning_content=delta.reasoning or UNSET,
            tool_calls=calls or UNSET,
        ),
        logprobs=ChatLogprobs(content=_token_logprobs(body, delta)) if body.logprobs else None,
        finish_reason=_finish_reason(body, delta) or "length",
        stop_reason=delta.stop_reason,
        token_ids=delta.sequence.token_ids if body.return_token_ids else UNSET,
    )


def _prompt_token_ids(body: ChatRequest, delta: Delta) -> list[int] | UnsetType:
    """Return the prompt's ids in the last chunk of a choice: they are known with the result."""
    return delta.prompt_token_ids or [] if body.return_token_ids and delta.finish_reason is not None else UNSET


def _function(call: wire.ToolCallResult) -> Function:
    return Function(name=call.name, arguments=call.arguments)


def _finish_reason(body: ChatRequest, delta: Delta) -> FinishReason | None:
    """Return `tool_calls` after calls, except of a function that the caller named: OpenAI and vLLM say `stop` then."""
    has_calls = bool(delta.num_calls_before or delta.tool_calls) and not isinstance(body.tool_choice, FunctionName)
    return "tool_calls" if delta.finish_reason == "stop" and has_calls else delta.finish_reason


def _token_logprobs(body: ChatRequest, delta: Delta) -> list[TokenLogprob]:
    as_ids = bool(body.return_tokens_as_token_ids)
    new = delta.sequence
    assert new.logprobs is not None
    columns = zip(new.token_ids, new.token_bytes, delta.contents, new.logprobs.values(), delta.channels, strict=True)
    found = []
    for entry, (token_id, token_bytes, content, logprob, channel) in enumerate(columns):
        assert logprob is not None
        found.append(
            TokenLogprob(
                token=token_text(token_id, token_bytes, as_ids),
                logprob=logprob,
                bytes=list(content),
                top_logprobs=[
                    TopLogprob(token=token_text(top_id, top_bytes, as_ids), logprob=value, bytes=list(top_bytes))
                    for top_id, top_bytes, value in top_tokens(new, entry)
                    if value is not None
                ],
                channel=channel,
            )
        )
    return found
