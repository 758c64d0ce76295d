"""How far one client has been told of a job's tokens, and what it is told next. Pure.

The place in a job's events is how many tokens of each sequence were told: `3,5` after three and five. It is the id of
each event, so a client that comes back with `Last-Event-ID` goes on where it was.
"""

import re
from typing import Self

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from scorepool import wire

PLACE = re.compile(r"[0-9]{1,6}(,[0-9]{1,6}){0,127}")


class Told(Struct, frozen=True, kw_only=True):
    """One event: entries of one sequence, or, where `restart` is true, that all that was told is void."""

    place: str
    growth: wire.TokenDelta | UnsetType = UNSET
    restart: bool = False


class EventCursor:
    def __init__(self, counts: list[int]) -> None:
        self._told: dict[int, list[int | None]] = {
            sequence: [None] * count for sequence, count in enumerate(counts)
        }  # token ids; None: told on another connection

    @classmethod
    def parse(cls, place: str) -> Self:
        """Raises ValueError with a sentence."""
        if place and not PLACE.fullmatch(place):
            raise ValueError(f"Last-Event-ID: expected the id of an earlier event, like `3,5`, found {place[:80]!r}")
        return cls([int(count) for count in place.split(",")] if place else [])

    @property
    def place(self) -> str:
        num_sequences = max(self._told, default=0) + 1
        return ",".join(str(len(self._told.get(sequence, ()))) for sequence in range(num_sequences))

    def grow(self, growth: wire.TokenDelta) -> list[Told]:
        """Nothing where it is known, or where growths before it are missing."""
        told = self._told.setdefault(growth.sequence, [])
        overlap = len(told) - growth.first
        if overlap < 0:
            return []
        known = told[growth.first :]
        if any(old not in (None, new) for old, new in zip(known, growth.token_ids, strict=False)):
            self._told = {}
            return [Told(place=self.place, restart=True), *self.grow(growth)]
        if overlap >= len(growth.token_ids):
            return []
        told += growth.token_ids[overlap:]
        return [Told(place=self.place, growth=_from(growth, overlap))]

    def end(self, id: str, result: wire.Result) -> list[Told]:  # noqa: A002
        """What is left of every sequence."""
        events = []
        for sequence, scored in enumerate(result.sequences):
            events += self.grow(_whole(id, sequence, scored))
        return events


def _whole(id: str, sequence: int, scored: wire.SequenceResult) -> wire.TokenDelta:  # noqa: A002
    """The generated entries of a result."""
    start = scored.num_reported_prompt_tokens
    generated = wire.TokenDelta(
        id=id,
        sequence=sequence,
        first=-start,
        token_ids=scored.token_ids,
        token_bytes=scored.token_bytes,
        logprobs=scored.logprobs,
        top_ids=scored.top_ids,
        top_bytes=scored.top_bytes,
        top_logprobs=scored.top_logprobs,
        num_prompt_tokens=scored.num_prompt_tokens,
    )
    # These know of generated tokens alone.
    return replace(
        _from(generated, start), channels=scored.channels, tool_calls=scored.tool_calls, skipped=scored.skipped
    )


def _from(growth: wire.TokenDelta, start: int) -> wire.TokenDelta:
    first = growth.first + start
    return replace(
        growth,
        first=first,
        token_ids=growth.token_ids[start:],
        token_bytes=growth.token_bytes[start:],
        logprobs=None if growth.logprobs is None else wire.Floats(growth.logprobs[start:]),
        top_ids=None if growth.top_ids is None else growth.top_ids[start:],
        top_bytes=None if growth.top_bytes is None else growth.top_bytes[start:],
        top_logprobs=None if growth.top_logprobs is None else growth.top_logprobs[start:],
        channels=None if growth.channels is None else growth.channels[start:],
        tool_calls=[call for call in growth.tool_calls if call.entry >= first],
        num_prompt_tokens=None if first else growth.num_prompt_tokens,
        skipped=[number for number in growth.skipped if number >= first],
    )
