"""Track a choice that is streamed: the tokens that were sent, and the delta that comes next. Pure.

Token deltas come while the worker generates, and may be missing, repeated or late. The job's result ends the choice and
fills what is missing. Nothing that was sent is taken back: the joined deltas equal the choice of an answer that is not
streamed.
"""

from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.detokenizer import IncrementalDetokenizer, content_bytes, emitted_bytes, generated_text


class Diverged(Exception):
    """Report that the job ran again, after its worker's death, and generated other tokens than those that were sent."""


class Delta(Struct, frozen=True, kw_only=True):
    """Add new tokens to one choice. `sequence` holds the columns of these tokens alone.

    `contents[j]` is what token j adds to the text of its channel. A completion has the channel `content` alone.
    """

    index: int
    text: str
    reasoning: str
    tool_calls: list[wire.ToolCallResult]  # those that end in these tokens
    num_calls_before: int  # calls of the choice in earlier deltas
    sequence: wire.SequenceResult
    contents: list[bytes]
    channels: list[wire.Channel]
    text_offset: list[int]
    # Fields of the last delta:
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None  # if the prompt was text
    draft_logprobs: list[wire.DraftLogprob] | None = None  # of the whole choice, if they were asked for


class ChoiceStream:
    """Turn the token deltas and the result of a job into the deltas of one choice."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._sent: list[int] = []  # token ids
        self._text = IncrementalDetokenizer()
        self._reasoning = IncrementalDetokenizer()
        self._num_calls = 0
        self.num_reasoning = 0  # tokens of the channel `reasoning` in the deltas so far
        self._channel: wire.Channel = "markup"  # of the last token that is no markup
        self._target_bytes: list[bytes] | None = None

    @property
    def num_sent(self) -> int:
        """Return the number of tokens in the deltas so far."""
        return len(self._sent)

    def add(self, tokens: wire.TokenDelta) -> Delta | None:
        """Return the tokens that were not sent yet, or None. Raise Diverged if they contradict the sent ones."""
        overlap = self._overlap(tokens)
        if not 0 <= overlap < len(tokens.token_ids):  # tokens before these are missing, or all are known
            return None
        return self._delta(_sequence_of(tokens), emitted_bytes(tokens), overlap)

    def add_each(self, tokens: wire.TokenDelta) -> Iterator[Delta]:
        """Yield the tokens that were not sent yet, each in a delta of its own. Raise Diverged as `add` does.

        With `end_each`, the deltas of an answer are then the same, however its tokens come.
        """
        overlap = self._overlap(tokens)
        if not 0 <= overlap < len(tokens.token_ids):
            return
        sequence, contents = _sequence_of(tokens), emitted_bytes(tokens)
        for start in range(overlap, len(tokens.token_ids)):
            yield self._delta(sequence, contents, start, start + 1)

    def end_each(self, sequence: wire.SequenceResult) -> Iterator[Delta]:
        """Yield the rest of the choice, each token in a delta of its own. Raise Diverged as `end` does.

        The U+FFFD of other channels than the last token's come after it, in deltas of their own.
        """
        contents = content_bytes(sequence)
        if sequence.token_ids[: len(self._sent)] == self._sent:
            for start in range(len(self._sent), len(sequence.token_ids) - 1):
                yield self._delta(sequence, contents, start, start + 1)
        yield from _split_ends(self.end(sequence, contents), self._channel)

    def add_runs(self, tokens: wire.TokenDelta) -> Iterator[Delta]:
        """Yield the tokens that were not sent yet, those of each channel in a delta. Raise Diverged as `add` does.

        With `end_runs`, no delta has two of reasoning, content and calls, however its tokens come.
        """
        overlap = self._overlap(tokens)
        if not 0 <= overlap < len(tokens.token_ids):
            return
        sequence, contents = _sequence_of(tokens), emitted_bytes(tokens)
        for start, end in _runs(tokens.channels, overlap, len(tokens.token_ids)):
            yield self._delta(sequence, contents, start, end)

    def end_runs(self, sequence: wire.SequenceResult) -> Iterator[Delta]:
        """Yield the rest of the choice, the tokens of each channel in a delta. Raise Diverged as `end` does."""
        contents = content_bytes(sequence)
        if sequence.token_ids[: len(self._sent)] == self._sent:
            [*runs, _] = _runs(sequence.channels, len(self._sent), len(sequence.token_ids))
            for start, end in runs:
                yield self._delta(sequence, contents, start, end)
        yield from _split_ends(self.end(sequence, contents), self._channel)

    def _overlap(self, tokens: wire.TokenDelta) -> int:
        """Return how many of these tokens were sent; below 0 if tokens before them were not. Raise Diverged."""
        overlap = len(self._sent) - tokens.first
        known = tokens.token_ids[: max(overlap, 0)]
        if known != self._sent[tokens.first : tokens.first + len(known)]:
            raise Diverged
        return overlap

    def end(self, sequence: wire.SequenceResult, contents: list[bytes] | None = None) -> Delta:
        """Return the rest of the choice. Raise Diverged if the result contradicts the sent tokens.

        `contents` are the tokens' contributions to the text, by default `content_bytes(sequence)`.
        """
        if sequence.token_ids[: len(self._sent)] != self._sent:
            raise Diverged
        contents = content_bytes(sequence) if contents is None else contents
        delta = self._delta(sequence, contents, len(self._sent))
        return replace(  # with U+FFFD for characters that stay unfinished
            delta,
            text=delta.text + self._text.end(),
            reasoning=delta.reasoning + self._reasoning.end(),
            finish_reason=sequence.finish_reason or "length",
            prompt_token_ids=sequence.prompt_token_ids,
            stop_reason=sequence.stop_reason,
            draft_logprobs=sequence.draft_logprobs,
        )

    def _delta(self, sequence: wire.SequenceResult, contents: list[bytes], start: int, end: int | None = None) -> Delta:
        """Build the delta of the tokens from number `start` on, up to number `end`."""
        self._target_bytes = sequence.target_bytes or self._target_bytes  # deltas after the first have none
        new = replace(columns_from(sequence, start, end), target_bytes=self._target_bytes)
        num_before = len(self._sent)
        self._sent += new.token_ids
        calls = [call for call in sequence.tool_calls if num_before <= call.entry < len(self._sent)]
        added = contents[start:end]
        channels = new.channels or ["content"] * len(added)
        self._channel = next((each for each in reversed(channels) if each != "markup"), self._channel)
        self.num_reasoning += new.num_reasoning_tokens
        added = [b"" if channel == "markup" else content for content, channel in zip(added, channels, strict=True)]
        text, offsets = self._text.add(_only_channel("content", added, channels))
        reasoning, _ = self._reasoning.add(_only_channel("reasoning", added, channels))
        num_calls_before = self._num_calls
        self._num_calls += len(calls)
        return Delta(
            index=self._index,
            text=text,
            reasoning=reasoning,
            tool_calls=calls,
            num_calls_before=num_calls_before,
            sequence=new,
            contents=added,
            channels=channels,
            text_offset=offsets,
        )


def _sequence_of(tokens: wire.TokenDelta) -> wire.SequenceResult:
    return wire.SequenceResult(
        text="",
        channels=tokens.channels,
        tool_calls=tokens.tool_calls,
        target_bytes=tokens.target_bytes,
        **tokens.columns(),
    )


def _runs(channels: list[wire.Channel] | None, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield where the tokens of a channel begin and end, at least once. Markup belongs to what is before it."""
    current: wire.Channel = "markup"
    for number, channel in enumerate(channels[start:end] if channels else (), start):
        if channel == "markup":
            continue
        if current not in ("markup", channel):
            yield start, number
            start = number
        current = channel
    yield start, end


def _split_ends(last: Delta, channel: wire.Channel) -> Iterator[Delta]:
    """Yield the last delta, after it the U+FFFD of characters of other channels than its own that stay unfinished."""
    nothing: dict[str, Any] = {"tool_calls": [], "reasoning": "", "text": ""}
    not_last = {"finish_reason": None, "stop_reason": None, "prompt_token_ids": None, "draft_logprobs": None}
    own = {"tool_call": "tool_calls", "reasoning": "reasoning"}.get(channel, "text")
    names = sorted(nothing, key=lambda name: name != own)
    [*before, _] = [name for name in names if getattr(last, name) != nothing[name]] or ["text"]
    for name in before:
        yield replace(last, **{other: empty for other, empty in nothing.items() if other != name} | not_last)
        last = replace(
            last,
            **{name: nothing[name]},
            num_calls_before=last.num_calls_before + len(last.tool_calls),
            sequence=columns_from(last.sequence, len(last.contents)),
            contents=[],
            channels=[],
            text_offset=[],
        )
    yield last


def _only_channel(name: wire.Channel, contents: list[bytes], channels: list[wire.Channel]) -> list[bytes]:
    """Blank the tokens of other channels."""
    return [content if channel == name else b"" for content, channel in zip(contents, channels, strict=True)]


def columns_from(sequence: wire.SequenceResult, start: int, end: int | None = None) -> wire.SequenceResult:
    """Return the columns of tokens [start, end), without a text."""
    channels = None if sequence.channels is None else sequence.channels[start:end]
    columns = sequence.columns(start, end)
    return wire.SequenceResult(text="", channels=channels, target_bytes=sequence.target_bytes, **columns)


def without_prompt(sequence: wire.SequenceResult) -> wire.SequenceResult:
    """Return a sequence without the tokens of its prompt, and without the columns that no delta has."""
    split = sequence.num_reported_prompt_tokens
    if not split:
        return sequence
    return replace(
        sequence,
        text=generated_text(sequence),
        num_reported_prompt_tokens=0,
        ranks=None,
        entropies=None,
        **sequence.columns(split),
    )
