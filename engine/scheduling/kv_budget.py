"""The memory for KV caches: how many sequences may hold one at the same time."""

from dataclasses import dataclass

from scorepool.engine.sequence import Sequence

RESERVED_FRACTION = 8  # of the rows and of the memory, that one of several shares leaves to the others


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Limits for the sequences that hold a KV cache between steps.

    Those that generate are rows of a batch, whose cache is a rectangle: each row takes what the longest may get. Any
    other is half way through its prompt, in a cache of its own.
    """

    max_running: int  # rows
    max_cached_tokens: int  # of the rectangle and the caches beside it

    @property
    def of_one_share(self) -> "KVBudget":
        """The most that one of several shares may take, so that rows that generate for hours do not stop the others."""
        rest = self.max_running // RESERVED_FRACTION
        return KVBudget(self.max_running - rest, self.max_cached_tokens - self.max_cached_tokens // RESERVED_FRACTION)

    def has_rows(self, sequences: list[Sequence]) -> bool:
        """True if those of these sequences that generate are not too many."""
        return sum(sequence.sampling is not None for sequence in sequences) <= self.max_running

    def has_memory(self, sequences: list[Sequence]) -> bool:
        """True if the caches of all these sequences fit. A sequence alone was checked by `Engine.add`."""
        if len(sequences) == 1:
            return True
        rows = [sequence.max_length for sequence in sequences if sequence.sampling is not None]
        beside = sum(sequence.max_length for sequence in sequences if sequence.sampling is None)
        return max(rows, default=0) * len(rows) + beside <= self.max_cached_tokens
