"""Define an entry of the result cache: what a worker computed of one sequence, for workers that get the same one."""

from typing import Literal

from msgspec import Struct

from scorepool.wire.columns import Floats


class CachedSequence(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hold what is computed of a sequence. The columns are those of the engine, one entry per reported token."""

    digest: bytes  # of the sequence, its options and what computes it: an entry under another one is not used
    generated_ids: list[int] = []
    text: bytes | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: bytes | int | None = None
    logprobs: Floats
    top_ids: list[list[int]] = []
    top_logprobs: list[Floats] = []
    target_logprobs: list[Floats] = []
    ranks: list[int | None] = []
    entropies: Floats | None = None
    min_logprobs: Floats | None = None
    sampled_logprobs: Floats | None = None
