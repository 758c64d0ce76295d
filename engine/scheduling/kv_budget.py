"""The memory for KV caches: how many sequences may hold one at the same time."""

from dataclasses import dataclass

from scorepool.engine.sequence import Sequence

RESERVED_FRACTION = 8  # of the rows and of the memory, that one of several shares leaves to the others


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Limits for the sequences that hold a KV cache between steps."""

    max_running: int  # sequences
    max_cached_tokens: int  # sequences times the longest that one of them may get: the batch's cache is a rectangle

    @property
    def of_one_share(self) -> "KVBudget":
        """The most that one of several shares may take, so that rows that generate for hours do not stop the others."""
        rest = self.max_running // RESERVED_FRACTION
        return KVBudget(self.max_running - rest, self.max_cached_tokens - self.max_cached_tokens // RESERVED_FRACTION)

    def fits(self, sequences: list[Sequence]) -> bool:
        """True if there is room for the caches of all these sequences. A sequence alone was checked by `Engine.add`."""
        if len(sequences) == 1:
            return True
        longest = max(sequence.max_length for sequence in sequences)
        return len(sequences) <= self.max_running and longest * len(sequences) <= self.max_cached_tokens
