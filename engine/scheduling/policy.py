"""The policy for prefills: which of them start in a step. Answers with a slice or None, one prefill at a time.

Prefills are offered in the order of waiting.py. One that does not fit now is passed over, but never for good: the first
waiting sequence that may run is always admitted unless a chunked prefill is half way, and a sequence that needs a KV
cache waits only for sequences that come before it.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from scorepool.engine.scheduling.kv_budget import KVBudget, KVUsage
from scorepool.engine.scheduling.slice import Slice
from scorepool.engine.sequence import Sequence, Share

MAX_PASSED_OVER = 64  # waiting prefills that do not fit, until no more are offered in this step


@dataclass(slots=True)
class _Room:
    """The room for KV caches in one step. What one sequence waits for, no later one takes."""

    budget: KVBudget
    usage: KVUsage = field(default_factory=KVUsage)  # of the running sequences
    lacks_rows: bool = False
    lacks_memory: bool = False

    def has(self, sequence: Sequence) -> bool:
        """True if a sequence fits beside the running ones. One that does not generate needs no row of the batch."""
        needs_row = sequence.sampling is not None
        if self.lacks_memory or (needs_row and self.lacks_rows):
            return False
        together = self.usage.with_sequence(sequence)
        self.lacks_memory = not self.budget.has_memory(together)
        self.lacks_rows = self.lacks_rows or not self.budget.has_rows(together)
        return not (self.lacks_memory or (needs_row and self.lacks_rows))

    def take(self, sequence: Sequence) -> None:
        """Count a sequence that runs."""
        self.usage = self.usage.with_sequence(sequence)


class PrefillPolicy:
    """The prefills of one step. Made anew for every step."""

    def __init__(
        self,
        step_tokens: int,
        free_tokens: int,
        kv_budget: KVBudget,
        running: Iterable[Sequence],
        may_chunk: bool,
        has_several_shares: bool = False,
    ) -> None:
        """Start with no prefill admitted.

        step_tokens   tokens that a whole step could prefill; a longer prefill is cut into chunks
        free_tokens   tokens that this step may admit
        running       sequences that hold a KV cache already
        may_chunk     True if no chunked prefill is half way
        has_several_shares  True if one share must leave room to others
        """
        self._step_tokens = step_tokens
        self._free_tokens = free_tokens
        self._may_chunk = may_chunk
        self._room = _Room(kv_budget)
        self._rooms_of_shares: defaultdict[Share, _Room] | None = None
        if has_several_shares:
            self._rooms_of_shares = defaultdict(partial(_Room, kv_budget.of_one_share))
        for sequence in running:
            self._take_room(sequence)
        self._num_passed_over = 0

    @property
    def is_exhausted(self) -> bool:
        """True if no further prefill can be admitted in this step."""
        return self._free_tokens <= 0 or self._num_passed_over > MAX_PASSED_OVER

    def has_room(self, sequence: Sequence) -> bool:
        """True if the sequence's KV cache fits beside the running ones, and no earlier one waits for the same room.

        A sequence of a share that has taken its part waits alone: those of other shares pass it.
        """
        if self._rooms_of_shares is not None and not self._rooms_of_shares[sequence.share].has(sequence):
            return False
        return self._room.has(sequence)

    def has_tokens(self, num_tokens: int) -> bool:
        """True if a prefill of so many tokens may begin in this step, as a chunk if it is longer than a step."""
        return self._may_chunk if num_tokens > self._step_tokens else num_tokens <= self._free_tokens

    def is_held_up(self, sequence: Sequence, num_tokens: int) -> bool:
        """True if so many tokens of the sequence are longer than a step, and cannot begin in this one."""
        return num_tokens > self._step_tokens and not (self._may_chunk and self.has_room(sequence))

    def pass_over(self) -> None:
        """Count a waiting prefill that does not begin in this step."""
        self._num_passed_over += 1

    def try_admit(self, prefill: Slice) -> Slice | None:
        """Return what runs in this step: the prefill, or its first chunk if it is longer than a step; None if it waits.

        A chunked prefill starts alone.
        """
        is_long = prefill.num_tokens > self._step_tokens
        if not self.has_tokens(prefill.num_tokens) or (is_long and not self.has_room(prefill.sequence)):
            self.pass_over()
            return None
        admitted = prefill.first(self._free_tokens)
        self._free_tokens -= admitted.num_tokens
        self._may_chunk = False
        if prefill.sequence.sampling:
            self._take_room(prefill.sequence)
        return admitted

    def _take_room(self, sequence: Sequence) -> None:
        self._room.take(sequence)
        if self._rooms_of_shares is not None:
            self._rooms_of_shares[sequence.share].take(sequence)
