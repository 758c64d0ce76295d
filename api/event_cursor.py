"""Track which of a job's tokens one client of /events has received, and compute what it gets next. Pure.

The cursor is the number of tokens sent of each sequence, `3,5` after three and five, then the run of the job that
computed them and a checksum of their ids and of what computed them: `3,5@1795000000123456:9f2c11aa,0c32b5e1`. It is the
id of each event, so a client that reconnects with `Last-Event-ID` continues where it was, and is told if another run
computed other tokens meanwhile, or other weights the same ones. The counts alone are a cursor too.
"""

import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Self

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from scorepool import wire
from scorepool.api.delta_order import DeltaOrder
from scorepool.wire.request_fields import MAX_NUM_TOKENS

LAST_EVENT_ID = re.compile(
    r"(?P<counts>[0-9]{1,6}(,[0-9]{1,6}){0,127})"
    r"(@(?P<run>[0-9]{1,18}):(?P<checksums>[0-9a-f]{8}(,[0-9a-f]{8}){0,127}))?"
)


class CursorEvent(Struct, frozen=True, kw_only=True):
    """Send new tokens of one sequence or, if `restart` is true, the notice that all tokens sent are void.

    With `is_from_result` the tokens are the last of an ended job: each with all its bytes, also where the text ends.
    """

    event_cursor: str
    delta: wire.TokenDelta | UnsetType = UNSET
    restart: bool = False
    is_from_result: bool = False


class SentTokens:
    """Hold the ids of the tokens of one sequence that the client has.

    The client may claim any number of tokens of an earlier connection. Ids are kept only for tokens that the job has.
    """

    def __init__(self, count: int = 0, checksum: int | None = 0) -> None:
        self.checksum = checksum  # of the weights and all ids; None: the client sent none
        self._earlier_ids: dict[int, int] = {}  # by index: those of an earlier connection that came again
        self._earlier_checksum = checksum
        self._num_earlier = count
        self._ids: list[int] = []  # of this connection, after the earlier ones

    def __len__(self) -> int:
        return self._num_earlier + len(self._ids)

    def agree(self, first: int, token_ids: list[int], weights: str | None) -> bool:
        """True if these tokens from index `first` on, as far as they were sent, are those that were sent.

        `weights` computed them: of this connection, the caller has compared them with those before.
        """
        for index, token_id in enumerate(token_ids[: max(0, len(self) - first)], first):
            if self._known_id(index, token_id) != token_id:
                return False
        if self._earlier_checksum is None or not first < self._num_earlier <= first + len(token_ids):
            return True
        if len(self._earlier_ids) < self._num_earlier:
            return True
        earlier_ids = [self._earlier_ids[index] for index in range(self._num_earlier)]
        # A worker of an earlier release did not say what computed them.
        return self._earlier_checksum in {
            _checksum(earlier_ids, _checksum_of_weights(each)) for each in (weights, None)
        }

    def _known_id(self, index: int, token_id: int) -> int:
        """Return the id that was sent at the index. For one of an earlier connection, the first that comes again."""
        if index < self._num_earlier:
            return self._earlier_ids.setdefault(index, token_id)
        return self._ids[index - self._num_earlier]

    def append(self, token_ids: list[int], weights: str | None) -> None:
        if not len(self):
            self.checksum = _checksum_of_weights(weights)
        self._ids += token_ids
        if self.checksum is not None:
            self.checksum = _checksum(token_ids, self.checksum)


class EventCursor:
    """Hold the tokens that the client has, by sequence."""

    def __init__(self, sent: list[SentTokens], run: int = 0) -> None:
        self._sent = dict(enumerate(sent))
        self._order = DeltaOrder(run, [len(tokens) for tokens in sent])

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a `Last-Event-ID`. Raises ValueError with a sentence."""
        if not text:
            return cls([])
        found = LAST_EVENT_ID.fullmatch(text)
        counts = [int(count) for count in found["counts"].split(",")] if found else []
        checksums: list[int | None] = [None] * len(counts)
        if found and found["run"]:
            checksums = [int(checksum, 16) for checksum in found["checksums"].split(",")]
        if not found or len(checksums) != len(counts) or max(counts) > MAX_NUM_TOKENS:
            raise ValueError(
                f"Last-Event-ID: expected the id of an earlier event, like `3,5`, found {wire.quote(text)}"
            )
        return cls(list(map(SentTokens, counts, checksums)), int(found["run"] or 0))

    def __str__(self) -> str:
        sent = [self._sent.get(sequence, SentTokens()) for sequence in range(max(self._sent, default=0) + 1)]
        counts = ",".join(str(len(tokens)) for tokens in sent)
        checksums = [f"{tokens.checksum:08x}" for tokens in sent if tokens.checksum is not None]
        if not self._order.run or len(checksums) < len(sent):
            return counts
        return f"{counts}@{self._order.run}:{','.join(checksums)}"

    @property
    def missing(self) -> Mapping[int, int]:
        """The index of the first token that did not arrive, by sequence, where later ones did."""
        return self._order.missing

    def advance(self, delta: wire.TokenDelta) -> list[CursorEvent]:
        """Return the events for a delta: none if it was sent before, or if it must wait for others."""
        if not self._order.admit(delta):
            return []
        if self._order.agrees(delta.weights) and self._agrees(delta):
            return self._send(delta)
        return [self._restart(), *self.advance(delta)]

    def finish(self, job_id: str, result: wire.Result) -> list[CursorEvent]:
        """Return the events for the tokens of every sequence that were not sent yet."""
        deltas = [_generated_tokens(job_id, index, sequence) for index, sequence in enumerate(result.sequences)]
        weights = result.stamp.weights
        agree = self._order.agrees(weights) and all(
            self._agrees(delta) and len(self._tokens(delta)) <= len(delta.token_ids) for delta in deltas
        )
        events = [] if agree else [self._restart()]
        self._order.weights = weights
        rest = [event for delta in deltas for event in self._send(delta)]
        return events + [replace(event, is_from_result=True) for event in rest]

    def _tokens(self, delta: wire.TokenDelta) -> SentTokens:
        return self._sent.setdefault(delta.sequence, SentTokens())

    def _agrees(self, delta: wire.TokenDelta) -> bool:
        return self._tokens(delta).agree(delta.first, delta.token_ids, self._order.weights)

    def _restart(self) -> CursorEvent:
        self._sent = {}
        self._order.begin_again()
        self._order.weights = None
        return CursorEvent(event_cursor=str(self), restart=True)

    def _send(self, delta: wire.TokenDelta) -> list[CursorEvent]:
        """Return the event for the tokens of a delta that were not sent, if there are any."""
        sent = self._tokens(delta)
        num_known = len(sent) - delta.first
        if num_known >= len(delta.token_ids):
            return []
        sent.append(delta.token_ids[num_known:], self._order.weights)
        return [CursorEvent(event_cursor=str(self), delta=_drop_first(delta, num_known))]


def _checksum(token_ids: Iterable[int], before: int = 0) -> int:
    """Return the checksum of ids that follow those with the checksum `before`."""
    return zlib.crc32("".join(f"{token_id}," for token_id in token_ids).encode(), before)


def _checksum_of_weights(weights: str | None) -> int:
    """Return where the checksum of ids begins."""
    return zlib.crc32((weights or "").encode())


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
        weights=None if first else delta.weights,
        skipped=[number for number in delta.skipped if number >= first],
    )
