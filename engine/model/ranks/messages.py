"""What rank 0 tells the others to run: the calls of BatchRunner, with what a batch reads of sequences and prefixes.

Sequences and prefixes are numbers here. The others have objects of their own for them, and no sampled tokens.
"""

from msgspec import Struct

from scorepool.engine.model_info import Pooling


class SequenceMessage(Struct, frozen=True, array_like=True):
    """A sequence, without its tokens."""

    number: int
    num_input_tokens: int
    score_from: int | None
    generates: bool
    pooled_position: int | None  # None: it is not classified
    pooling: Pooling | None


class PrefixMessage(Struct, frozen=True, array_like=True):
    """A prefix that sequences share."""

    number: int
    length: int


class SliceMessage(Struct, frozen=True, array_like=True):
    """A slice of a prefill, with its tokens, or one of a decoding sequence."""

    sequence: SequenceMessage
    start: int
    end: int
    token_ids: list[int]  # the given ones among those of the slice
    proposed_ids: tuple[int, ...]
    cached_prefix: PrefixMessage | None
    fills_prefix: PrefixMessage | None


class Prefill(Struct, frozen=True, tag=True):
    slices: list[SliceMessage]


class Decode(Struct, frozen=True, tag=True):
    slices: list[SliceMessage]
    last_ids: list[int]


class DropRejected(Struct, frozen=True, tag=True):
    num_rejected: list[tuple[int, int]]  # number of the sequence, tokens


class Pause(Struct, frozen=True, tag=True):
    sequences: list[int]


class Resume(Struct, frozen=True, tag=True):
    sequences: list[int]


class Release(Struct, frozen=True, tag=True):
    sequences: list[int]


class Close(Struct, frozen=True, tag=True):
    """The model is not used any more."""


Call = Prefill | Decode | DropRejected | Pause | Resume | Release | Close


class Message(Struct, frozen=True):
    """A call, and prefixes whose caches are dropped before it."""

    call: Call
    dropped_prefixes: list[int]
