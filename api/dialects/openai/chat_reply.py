"""Build the replies of `/v1/chat/completions`: one choice per sequence of a result, whole or in chunks. Pure."""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from scorepool import wire
from scorepool.api.dialects.deltas import ChoiceStream, Delta, without_prompt
from scorepool.api.dialects.detokenizer import token_text
from scorepool.api.dialects.openai.chat import ChatRequest
from scorepool.api.dialects.openai.chunks import ChunkWriter
from scorepool.api.dialects.openai.messages import ChatToolCall, FunctionCall
from scorepool.api.dialects.openai.prompt_logprobs import PromptLogprobs, to_prompt_logprobs
from scorepool.api.dialects.openai.responses import ResponseRequest
from scorepool.api.dialects.openai.sampling import (
    ChunkUsage,
    CompletionUsage,
    DraftLogprobsIfAsked,
    LastDraftLogprobs,
    LastFingerprint,
    LastModeIfLogprobs,
    LastPromptTokenIds,
    LastStopReason,
    ModeIfLogprobs,
    StopReason,
    TokenIdsIfAsked,
    reported_tokens,
    system_fingerprint,
    usage_of_results,
)
from scorepool.api.dialects.openai.structured_outputs import NamedToolChoice
from scorepool.api.dialects.top_cap import MaxTopLogprobsIfClamped
from scorepool.api.dialects.weights import LastWeightsVersion, WeightsVersion, weights_version
from scorepool.wire.result import CHANNELS

FinishReason = Literal["stop", "length", "tool_calls"]


class TopLogprob(Struct, frozen=True, kw_only=True):
    """Report one of the most likely tokens of a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    """Report a generated token. `bytes` are what it adds to its channel: none for markup or after a stop string."""

    top_logprobs: Annotated[
        list[TopLogprob], Meta(description="Most likely first, or those of `logprob_token_ids` in their order.")
    ]
    channel: Annotated[wire.Channel, Meta(description=CHANNELS)]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """Report the tokens of an answer."""

    content: Annotated[
        list[TokenLogprob], Meta(description="Every generated token in its order, whatever its channel.")
    ]
    refusal: None = None


class AnswerMessage(Struct, frozen=True, kw_only=True):
    """Give the answer of the model."""

    role: Literal["assistant"] = "assistant"
    content: Annotated[str | None, Meta(description="null if the model only called functions.")]
    refusal: None = None
    reasoning_content: Annotated[str | UnsetType, Meta(description="Present if the model reasoned.")] = UNSET
    tool_calls: Annotated[list[ChatToolCall] | UnsetType, Meta(description="Present if it called functions.")] = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """Give one of `n` answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: TokenIdsIfAsked = UNSET
    draft_logprobs: DraftLogprobsIfAsked = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """Answer a chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    system_fingerprint: str
    logprobs_mode: ModeIfLogprobs = UNSET
    max_top_logprobs: MaxTopLogprobsIfClamped = UNSET
    weights_version: WeightsVersion = UNSET
    prompt_token_ids: TokenIdsIfAsked = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatToolCallDelta(ChatToolCall, frozen=True, kw_only=True):
    """Stream a whole call: its tokens are held back until it can be read."""

    index: Annotated[int, Meta(description="Number of the call in its answer, the first being 0.")]


class ChatDelta(Struct, frozen=True, kw_only=True):
    """Add to an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCallDelta] | UnsetType = UNSET


class ChatChoiceChunk(Struct, frozen=True, kw_only=True):
    """Stream a part of one of `n` answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Annotated[FinishReason | None, Meta(description="null until the last chunk of the answer.")]
    stop_reason: LastStopReason = UNSET
    token_ids: TokenIdsIfAsked = UNSET
    draft_logprobs: LastDraftLogprobs = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    """Stream a part of the answer to a chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChoiceChunk]
    usage: ChunkUsage = UNSET
    system_fingerprint: LastFingerprint = UNSET
    logprobs_mode: LastModeIfLogprobs = UNSET
    max_top_logprobs: MaxTopLogprobsIfClamped = UNSET
    weights_version: LastWeightsVersion = UNSET
    prompt_token_ids: LastPromptTokenIds = UNSET


def to_chat_completion(body: ChatRequest, result: wire.Result, reply_id: str, created: int) -> ChatCompletion:
    """Build the reply. `created` is in unix s. Each choice is a stream of one delta."""
    [first, *_] = result.sequences
    deltas = [ChoiceStream(index).end(without_prompt(each)) for index, each in enumerate(result.sequences)]
    return ChatCompletion(
        id=reply_id,
        created=created,
        model=body.model,
        choices=[_to_choice(body, delta) for delta in deltas],
        usage=usage_of_results([result]),
        system_fingerprint=system_fingerprint(result.stamp),
        logprobs_mode=result.logprobs_mode if body.has_logprobs else UNSET,
        weights_version=weights_version([result], body.if_weights),
        prompt_token_ids=first.prompt_token_ids or [] if body.return_token_ids else UNSET,
        prompt_logprobs=UNSET if body.prompt_logprobs is None else to_prompt_logprobs(first, body.prompt_logprobs),
    )


class ChatChunkWriter(ChunkWriter[ChatChunk]):
    """Translate the events of a chat's job to ChatChunks."""

    def __init__(self, body: ChatRequest, job_ids: Sequence[str], reply_id: str, created: int) -> None:
        super().__init__(body, job_ids, created)
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
    """Build the chunk of one delta."""
    calls = [
        ChatToolCallDelta(index=delta.num_calls_before + offset, id=call.id, function=_function(call))
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
        logprobs=_logprobs(body, delta),
        finish_reason=_finish_reason(body, delta),
        stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
        token_ids=delta.sequence.token_ids if body.return_token_ids else UNSET,
        draft_logprobs=UNSET if delta.draft_logprobs is None else delta.draft_logprobs,
    )


def _to_choice(body: ChatRequest, delta: Delta) -> ChatChoice:
    calls = [ChatToolCall(id=call.id, function=_function(call)) for call in delta.tool_calls]
    return ChatChoice(
        index=delta.index,
        message=AnswerMessage(
            content=None if calls and not delta.text else delta.text,
            reasoning_content=delta.reasoning or UNSET,
            tool_calls=calls or UNSET,
        ),
        logprobs=_logprobs(body, delta),
        finish_reason=_finish_reason(body, delta) or "length",
        stop_reason=delta.stop_reason,
        token_ids=delta.sequence.token_ids if body.return_token_ids else UNSET,
        draft_logprobs=UNSET if delta.draft_logprobs is None else delta.draft_logprobs,
    )


def _prompt_token_ids(body: ChatRequest, delta: Delta) -> list[int] | UnsetType:
    """Return the prompt's ids in the last chunk of a choice: they are known with the result."""
    return delta.prompt_token_ids or [] if body.return_token_ids and delta.finish_reason is not None else UNSET


def _function(call: wire.ToolCallResult) -> FunctionCall:
    return FunctionCall(name=call.name, arguments=call.arguments)


def _finish_reason(body: ChatRequest, delta: Delta) -> FinishReason | None:
    """Return `tool_calls` after calls, but `stop` if the request named the function, as OpenAI and vLLM do."""
    has_calls = bool(delta.num_calls_before or delta.tool_calls) and not isinstance(body.tool_choice, NamedToolChoice)
    return "tool_calls" if delta.finish_reason == "stop" and has_calls else delta.finish_reason


def _logprobs(body: ChatRequest, delta: Delta) -> ChatLogprobs | None:
    if not body.logprobs:
        return None
    return ChatLogprobs(content=token_logprobs(body, delta))


def token_logprobs(body: ChatRequest | ResponseRequest, delta: Delta) -> list[TokenLogprob]:
    """Return the tokens of a delta with their logprobs, and what is reported beside each."""
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
                    for top_id, top_bytes, value in reported_tokens(
                        new, entry, body.logprob_token_ids, body.top_logprobs or 0
                    )
                    if value is not None
                ],
                channel=channel,
            )
        )
    return found
