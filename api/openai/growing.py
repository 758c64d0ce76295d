"""One choice that is streamed: what of it has been sent, and what comes next. Pure.

Growths come while the worker generates, and may be missing, repeated or late; the result ends them, and fills what is
missing. What was sent is never taken back: joined, the pieces are the choice of an answer that is not streamed.
"""

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

import wire
from api.openai.spelling import TextSoFar, content_bytes


class Diverged(Exception):
    """The job ran again, after its worker's death, and generated something else than what was sent."""


class Piece(Struct, frozen=True, kw_only=True):
    """`scored` holds the columns of the new entries alone; `contents[j]` is what entry j adds to the text."""

    index: int
    text: str
    scored: wire.Scored
    contents: list[bytes]
    text_offset: list[int]
    finish_reason: Literal["stop", "length"] | None = None  # of the last piece


class Growing:
    def __init__(self, index: int) -> None:
        self._index = index
        self._sent: list[int] = []  # token ids
        self._text = TextSoFar()

    def grow(self, growth: wire.Growth) -> Piece | None:
        """None: there is nothing new in it. Raises Diverged."""
        overlap = len(self._sent) - growth.first
        if overlap < 0:  # growths are missing
            return None
        known = growth.token_ids[:overlap]
        if known != self._sent[growth.first : growth.first + len(known)]:
            raise Diverged
        if len(growth.token_ids) <= overlap:
            return None
        scored = wire.Scored(
            token_ids=growth.token_ids,
            token_bytes=growth.token_bytes,
            text="",
            logprobs=growth.logprobs,
            top_ids=growth.top_ids,
            top_bytes=growth.top_bytes,
            top_logprobs=growth.top_logprobs,
        )
        return self._piece(scored, growth.token_bytes, overlap)

    def end(self, scored: wire.Scored) -> Piece:
        """The rest. Raises Diverged."""
        if scored.token_ids[: len(self._sent)] != self._sent:
            raise Diverged
        piece = self._piece(scored, content_bytes(scored), len(self._sent))
        rest = self._text.end()  # of a character that stays unfinished
        return replace(piece, text=piece.text + rest, finish_reason=scored.finish_reason or "length")

    def _piece(self, scored: wire.Scored, contents: list[bytes], start: int) -> Piece:
        """Entries from `start` on."""
        new = _from(scored, start)
        self._sent += new.token_ids
        text, offsets = self._text.add(contents[start:])
        return Piece(index=self._index, text=text, scored=new, contents=contents[start:], text_offset=offsets)


def _from(scored: wire.Scored, start: int) -> wire.Scored:
    """The columns that dialects show, from entry `start` on."""
    return wire.Scored(
        token_ids=scored.token_ids[start:],
        token_bytes=scored.token_bytes[start:],
        text="",
        logprobs=None if scored.logprobs is None else wire.Floats(scored.logprobs[start:]),
        top_ids=None if scored.top_ids is None else scored.top_ids[start:],
        top_bytes=None if scored.top_bytes is None else scored.top_bytes[start:],
        top_logprobs=None if scored.top_logprobs is None else scored.top_logprobs[start:],
    )
