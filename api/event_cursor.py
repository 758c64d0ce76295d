"""Track which of a job's tokens one client of /events has received, and compute what it gets next. Pure.

The cursor is the number of tokens sent of each sequence: `3,5` after three and five. It is the id of each event, so a
client that reconnects with `Last-Event-ID` continues where it was.
"""

import re
from typing import Self

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from scorepool import wire

LAST_EVENT_ID = re.compile(r"[0-9]{1,6}(,[0-9]{1,6}){0,127}")


class CursorEvent(Struct, frozen=True, kw_only=True):
    """Send new tokens of one sequence or, if `restart` is true, the notice that all tokens sent are void."""

    event_cursor: str
    delta: wire.TokenDelta | UnsetType = UNSET
    restart: bool = False


class EventCursor:
    """Hold the ids of the tokens that the client has, by sequence."""

    def __init__(self, counts: list[int]) -> None:
        self._sent: dict[int, list[int | None]] = {
            sequence: [None] * count for sequence, count in enumerate(counts)
        }  # token ids by sequence; None: sent on an earlier connection

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a `Last-Event-ID`. Raises ValueError with a sentence."""
        if text and not LAST_EVENT_ID.fullmatch(text):
            raise ValueError(f"Last-Event-ID: expected the id of an earlier event, like `3,5`, found {text[:80]!r}")
        return cls([int(count) for count in text.split(",")] if text else [])

    def __str__(self) -> str:
        num_sequences = max(self._sent, default=0) + 1
        return ",".join(str(len(self._sent.get(sequence, ()))) for sequence in range(num_sequences))

    def advance(self, delta: wire.TokenDelta) -> list[CursorEvent]:
        """Return the events for a delta: none if it was sent before, or if tokens before it are missing."""
        sent = self._sent.setdefault(delta.sequence, [])
        overlap = len(sent) - delta.first
        if overlap < 0:
            return []
        resent = sent[delta.first :]
        if any(old not in (None, new) for old, new in zip(resent, delta.token_ids, strict=False)):
            self._sent = {}
            return [CursorEvent(event_cursor=str(self), restart=True), *self.advance(delta)]
        if overlap >= len(delta.token_ids):
            return []
        sent += delta.token_ids[overlap:]
        return [CursorEvent(event_cursor=str(self), delta=_drop_first(delta, overlap))]

    def finish(self, job_id: str, result: wire.Result) -> list[CursorEvent]:
        """Return the events for the tokens of every sequence that were not sent yet."""
        events = []
        for index, sequence in enumerate(result.sequences):
            events += self.advance(_generated_tokens(job_id, index, sequence))
        return events


def _generated_tokens(job_id: str, index: int, sequence: wire.SequenceResult) -> wire.TokenDelta:
    """Return the generated tokens of a result as one delta."""
    start = sequence.num_reported_prompt_tokens
    return wire.TokenDelta(
        id=job_id,
        sequence=index,
        first=0,
        num_prompt_tokens=sequence.num_prompt_tokens,
        **sequence.columns(start),
        # These three cover the generated tokens only.
        channels=sequence.channels,
        tool_calls=sequence.tool_calls,
        skipped=sequence.skipped,
    )


def _drop_first(delta: wire.TokenDelta, count: int) -> wire.TokenDelta:
    """Return the delta without its first `count` tokens."""
    first = delta.first + count
    return replace(
        delta,
        first=first,
        **delta.columns(count),
        channels=None if delta.channels is None else delta.channels[count:],
        tool_calls=[call for call in delta.tool_calls if call.entry >= first],
        num_prompt_tokens=None if first else delta.num_prompt_tokens,
        skipped=[number for number in delta.skipped if number >= first],
    )
