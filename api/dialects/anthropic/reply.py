"""Build the replies of `/v1/messages`: a message with its content blocks, whole or as events. Pure.

A whole message is what its events add up to, so both have the same blocks: one for each run of tokens of one channel,
in their order.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.anthropic.messages import MessagesRequest
from scorepool.api.dialects.deltas import ChoiceStream, Delta
from scorepool.api.dialects.protocol import StreamEvent

EndReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
SIGNATURE = "unsigned"  # clients send back only reasoning whose signature is not empty


class TextContent(Struct, frozen=True, kw_only=True, tag="text", tag_field="type"):
    """Give the text of an answer. It has no `citations`: the AI SDK refuses null."""

    text: str


class ThinkingContent(Struct, frozen=True, kw_only=True, tag="thinking", tag_field="type"):
    """Give what the model reasoned."""

    thinking: str
    signature: Annotated[
        str, Meta(description="Reasoning is not signed: always `unsigned`. Empty where a stream begins the block.")
    ] = ""


class ToolUseContent(Struct, frozen=True, kw_only=True, tag="tool_use", tag_field="type"):
    """Give a call of the answer."""

    id: str
    name: str
    input: Annotated[Raw, Meta(description="The arguments: an object.")]


ContentBlock = TextContent | ThinkingContent | ToolUseContent


class ThinkingTokens(Struct, frozen=True, kw_only=True):
    """Divide output tokens."""

    thinking_tokens: int


class MessageUsage(Struct, frozen=True, kw_only=True):
    """Count the tokens of a message. Those of its prompt are the input tokens and those that were read from a cache."""

    input_tokens: Annotated[int, Meta(description="Tokens that were not read from a cache. A stream begins with all.")]
    cache_creation_input_tokens: Annotated[int, Meta(description="Always 0: not counted.")] = 0
    cache_read_input_tokens: Annotated[
        int,
        Meta(description="Tokens of a prefix that was computed before, or of a cached result. A stream begins with 0."),
    ] = 0
    output_tokens: int
    output_tokens_details: Annotated[
        ThinkingTokens | UnsetType, Meta(description="Absent at the start of a stream.")
    ] = UNSET
    service_tier: Literal["standard"] = "standard"


class MessageReply(Struct, frozen=True, kw_only=True):
    """Answer a conversation."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: Annotated[EndReason | None, Meta(description="null at the start of a stream.")]
    stop_sequence: Annotated[str | None, Meta(description="The item of `stop_sequences` that ended the answer.")]
    usage: MessageUsage


class TokenCount(Struct, frozen=True, kw_only=True):
    """Count the tokens of a prompt."""

    input_tokens: int


class BlockDelta(Struct, frozen=True, kw_only=True):
    """Add to a block, or end the message. `type` is absent at the end."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: EndReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(Struct, frozen=True, kw_only=True):
    """Stream a part of a message. `type` says which of the fields are present; it is the event's name too."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: MessageReply | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: ContentBlock | UnsetType = UNSET
    delta: BlockDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


def to_message(body: MessagesRequest, result: wire.Result, unique_id: str) -> MessageReply:
    """Build the reply."""
    writer = MessageWriter(body, unique_id)
    for delta in ChoiceStream(0).end_runs(result.sequences[0]):
        writer.add_delta(delta)
    return writer.ended(result)


class MessageWriter:
    """Translate the events of a message's job to its events."""

    def __init__(self, body: MessagesRequest, unique_id: str) -> None:
        self._body, self._unique_id = body, unique_id
        self._choice = ChoiceStream(0)
        self._blocks: list[ContentBlock] = []  # the last one may be open
        self._is_begun = self._is_open = False
        self._result: wire.Result | None = None

    def add(self, event: StreamEvent) -> list[object]:
        """Return the events that follow. Raise Diverged if a job ran again and generated other tokens."""
        if isinstance(event, wire.TokenDelta):
            deltas, num_prompt_tokens = self._choice.add_runs(event), event.num_prompt_tokens
        else:
            result = self._result = event.result
            assert result is not None
            deltas, num_prompt_tokens = self._choice.end_runs(result.sequences[0]), result.usage.prompt_tokens
        events: list[object] = []
        for delta in deltas:
            events += [] if self._is_begun else self._begin(num_prompt_tokens or 0)
            events += self.add_delta(delta)
        return events

    def end(self) -> list[object]:
        """Return the events that close the message."""
        assert self._result is not None
        message = self.ended(self._result)
        assert message.stop_reason is not None
        delta = BlockDelta(stop_reason=message.stop_reason, stop_sequence=message.stop_sequence)
        return [
            _encode(MessageEvent(type="message_delta", delta=delta, usage=message.usage)),
            _encode(MessageEvent(type="message_stop")),
        ]

    def ended(self, result: wire.Result) -> MessageReply:
        """Return the whole message, after its last delta."""
        [sequence] = result.sequences
        reasoning = ThinkingTokens(thinking_tokens=sequence.num_reasoning_tokens)
        return replace(
            self._message(result.usage.prompt_tokens, result.usage.completion_tokens),
            stop_reason=self._stop_reason(sequence),
            stop_sequence=sequence.stop_reason if isinstance(sequence.stop_reason, str) else None,
            usage=MessageUsage(
                input_tokens=result.usage.prompt_tokens - result.usage.cached_tokens,
                cache_read_input_tokens=result.usage.cached_tokens,
                output_tokens=result.usage.completion_tokens,
                output_tokens_details=reasoning,
            ),
        )

    def add_delta(self, delta: Delta) -> list[object]:
        """Return the events of new tokens of one channel, and of the end of the last block with the last ones."""
        events: list[object] = []
        if delta.reasoning:
            events += self._open(ThinkingContent(thinking=""))
            events += self._add(ThinkingContent, BlockDelta(type="thinking_delta", thinking=delta.reasoning))
        if delta.text:
            events += self._open(TextContent(text=""))
            events += self._add(TextContent, BlockDelta(type="text_delta", text=delta.text))
        for call in delta.tool_calls:
            events += self._add_call(call)
        return events + (self._close() if delta.finish_reason is not None else [])

    def _stop_reason(self, sequence: wire.SequenceResult) -> EndReason:
        if sequence.finish_reason != "stop":
            return "max_tokens"
        if isinstance(sequence.stop_reason, str):
            return "stop_sequence"
        return "tool_use" if any(isinstance(block, ToolUseContent) for block in self._blocks) else "end_turn"

    def _begin(self, num_prompt_tokens: int) -> list[object]:
        self._is_begun = True
        return [_encode(MessageEvent(type="message_start", message=self._message(num_prompt_tokens, 0)))]

    def _open(self, block: TextContent | ThinkingContent) -> list[object]:
        """Begin a block, unless one of this kind is open."""
        if self._is_open and isinstance(self._blocks[-1], type(block)):
            return []
        events = self._close()
        self._blocks.append(block)
        self._is_open = True
        return [*events, _encode(MessageEvent(type="content_block_start", index=self._index, content_block=block))]

    def _add(self, kind: type[TextContent | ThinkingContent], delta: BlockDelta) -> list[object]:
        block = self._blocks[-1]
        assert isinstance(block, kind)
        if isinstance(block, TextContent):
            self._blocks[-1] = replace(block, text=block.text + str(delta.text))
        else:
            self._blocks[-1] = replace(block, thinking=block.thinking + str(delta.thinking))
        return [_encode(MessageEvent(type="content_block_delta", index=self._index, delta=delta))]

    def _add_call(self, call: wire.ToolCallResult) -> list[object]:
        """Return the events of a whole call: its tokens are held back until it can be read."""
        events = self._close()
        self._blocks.append(ToolUseContent(id=call.id, name=call.name, input=Raw(call.arguments.encode())))
        begun = ToolUseContent(id=call.id, name=call.name, input=Raw(b"{}"))
        delta = BlockDelta(type="input_json_delta", partial_json=call.arguments)
        return [
            *events,
            _encode(MessageEvent(type="content_block_start", index=self._index, content_block=begun)),
            _encode(MessageEvent(type="content_block_delta", index=self._index, delta=delta)),
            _encode(MessageEvent(type="content_block_stop", index=self._index)),
        ]

    def _close(self) -> list[object]:
        """End the block that is open, if any."""
        if not self._is_open:
            return []
        self._is_open = False
        events: list[object] = [_encode(MessageEvent(type="content_block_stop", index=self._index))]
        block = self._blocks[-1]
        if isinstance(block, ThinkingContent):
            self._blocks[-1] = replace(block, signature=SIGNATURE)
            delta = BlockDelta(type="signature_delta", signature=SIGNATURE)
            events.insert(0, _encode(MessageEvent(type="content_block_delta", index=self._index, delta=delta)))
        return events

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1

    def _message(self, num_input_tokens: int, num_output_tokens: int) -> MessageReply:
        return MessageReply(
            id=f"msg_{self._unique_id}",
            model=self._body.model,
            content=list(self._blocks),
            stop_reason=None,
            stop_sequence=None,
            usage=MessageUsage(input_tokens=num_input_tokens, output_tokens=num_output_tokens),
        )


def _encode(event: MessageEvent) -> bytes:
    return b"event: " + event.type.encode() + b"\ndata: " + wire.encode_json(event) + b"\n\n"
