"""Define a finished row of a job that still runs: what the job's next worker need not compute if this one dies."""

from msgspec import Struct

from scorepool.wire.cached import CachedSequence


class CheckpointRow(CachedSequence, Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hold what was computed of one row. Its `digest` covers the version of the weights too."""

    index: int  # of the item, or of the generated sequence
    class_logits: list[float] | None = None
    embedding: bytes | None = None  # float64, little-endian, as the engine has it
    num_cached: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
