"""One choice that is streamed: what of it has been sent, and what comes next. Pure.

Growths come while the worker generates, and may be missing, repeated or late; the result ends them, and fills what is
missing. What was sent is never taken back: joined, the pieces are the choice of an answer that is not streamed.
"""

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.openai.detokenizer import IncrementalDetokenizer, content_bytes, told_bytes


class Diverged(Exception):
    """The job ran again, after its worker's death, and generated something else than what was sent."""


class Delta(Struct, frozen=True, kw_only=True):
    """`scored` holds the columns of the new entries alone; `contents[j]` is what entry j adds to its channel."""

    index: int
    text: str  # content; of what is no chat, all
    reasoning: str
    tool_calls: list[wire.ToolCallResult]  # that end in these entries
    num_calls_before: int
    scored: wire.SequenceResult
    contents: list[bytes]
    channels: list[wire.Channel]
    text_offset: list[int]
    # Of the last piece:
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None  # when the prompt was text


class ChoiceStream:
    def __init__(self, index: int) -> None:
        self._index = index
        self._sent: list[int] = []  # token ids
        self._text = IncrementalDetokenizer()
        self._reasoning = IncrementalDetokenizer()
        self._num_calls = 0

    @property
    def num_sent(self) -> int:
        return len(self._sent)

    def grow(self, growth: wire.TokenDelta) -> Delta | None:
        """None: there is nothing new in it. Raises Diverged."""
        overlap = len(self._sent) - growth.first
        if overlap < 0:  # growths are missing
            return None
        known = growth.token_ids[:overlap]
        if known != self._sent[growth.first : growth.first + len(known)]:
            raise Diverged
        if len(growth.token_ids) <= overlap:
            return None
        scored = wire.SequenceResult(
            token_ids=growth.token_ids,
            token_bytes=growth.token_bytes,
            text="",
            logprobs=growth.logprobs,
            top_ids=growth.top_ids,
            top_bytes=growth.top_bytes,
            top_logprobs=growth.top_logprobs,
            channels=growth.channels,
            tool_calls=growth.tool_calls,
        )
        return self._piece(scored, told_bytes(growth), overlap)

    def end(self, scored: wire.SequenceResult) -> Delta:
        """The rest. Raises Diverged."""
        if scored.token_ids[: len(self._sent)] != self._sent:
            raise Diverged
        piece = self._piece(scored, content_bytes(scored), len(self._sent))
        return replace(  # with the rest of characters that stay unfinished
            piece,
            text=piece.text + self._text.end(),
            reasoning=piece.reasoning + self._reasoning.end(),
            finish_reason=scored.finish_reason or "length",
            prompt_token_ids=scored.prompt_token_ids,
            stop_reason=scored.stop_reason,
        )

    def _piece(self, scored: wire.SequenceResult, contents: list[bytes], start: int) -> Delta:
        """Entries from `start` on."""
        calls = [call for call in scored.tool_calls if call.entry >= len(self._sent)]
        new = _from(scored, start)
        self._sent += new.token_ids
        added = contents[start:]
        channels = new.channels or ["content"] * len(added)
        added = [b"" if channel == "markup" else piece for piece, channel in zip(added, channels, strict=True)]
        text, offsets = self._text.add(_only("content", added, channels))
        reasoning, _ = self._reasoning.add(_only("reasoning", added, channels))
        num_calls_before = self._num_calls
        self._num_calls += len(calls)
        return Delta(
            index=self._index,
            text=text,
            reasoning=reasoning,
            tool_calls=calls,
            num_calls_before=num_calls_before,
            scored=new,
            contents=added,
            channels=channels,
            text_offset=offsets,
        )


def _only(wanted: wire.Channel, pieces: list[bytes], channels: list[wire.Channel]) -> list[bytes]:
    return [piece if channel == wanted else b"" for piece, channel in zip(pieces, channels, strict=True)]


def _from(scored: wire.SequenceResult, start: int) -> wire.SequenceResult:
    """The columns that dialects show, from entry `start` on."""
    return wire.SequenceResult(
        token_ids=scored.token_ids[start:],
        token_bytes=scored.token_bytes[start:],
        text="",
        logprobs=None if scored.logprobs is None else wire.Floats(scored.logprobs[start:]),
        top_ids=None if scored.top_ids is None else scored.top_ids[start:],
        top_bytes=None if scored.top_bytes is None else scored.top_bytes[start:],
        top_logprobs=None if scored.top_logprobs is None else scored.top_logprobs[start:],
        channels=None if scored.channels is None else scored.channels[start:],
    )
