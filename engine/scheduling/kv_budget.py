"""The memory for KV caches: how many sequences may hold one at the same time."""

from dataclasses import dataclass

from scorepool.engine.sequence import Sequence

RESERVED_FRACTION = 8  # of the rows and of the memory, that one of several shares leaves to the others


@dataclass(slots=True)
class KVUsage:
    """What the KV caches of some sequences take.

    Those that generate are rows of a batch, whose cache is a rectangle: each row takes what the longest may get. Any
    other is half way through its prompt, in a cache of its own.
    """

    num_sequences: int = 0
    num_rows: int = 0
    longest_row: int = 0  # tokens
    tokens_beside: int = 0  # of the caches beside the rectangle, together

    def with_sequence(self, sequence: Sequence) -> "KVUsage":
        """Return what is taken with one sequence more."""
        num_sequences, length = self.num_sequences + 1, sequence.max_length
        if sequence.sampling is None:
            return KVUsage(num_sequences, self.num_rows, self.longest_row, self.tokens_beside + length)
        return KVUsage(num_sequences, self.num_rows + 1, max(self.longest_row, length), self.tokens_beside)


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Limits for the sequences that hold a KV cache between steps."""

    max_running: int  # rows
    max_cached_tokens: int  # of the rectangle and the caches beside it

    @property
    def of_one_share(self) -> "KVBudget":
        """The most that one of several shares may take, so that rows that generate for hours do not stop the others."""
        rest = self.max_running // RESERVED_FRACTION
        return KVBudget(self.max_running - rest, self.max_cached_tokens - self.max_cached_tokens // RESERVED_FRACTION)

    def has_rows(self, usage: KVUsage) -> bool:
        """True if the sequences that generate are not too many."""
        return usage.num_rows <= self.max_running

    def has_memory(self, usage: KVUsage) -> bool:
        """True if the caches of all sequences fit. A sequence alone was checked by `Engine.add`."""
        num_tokens = usage.longest_row * usage.num_rows + usage.tokens_beside
        return usage.num_sequences == 1 or num_tokens <= self.max_cached_tokens
