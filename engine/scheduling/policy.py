"""The policy for prefills: which of them start in a step. Answers with a slice or None, one prefill at a time.

Prefills are offered in the order of waiting.py. One that does not fit now is passed over, but never for good: the first
waiting sequence that may run is always admitted unless a chunked prefill is half way, and a sequence that needs a KV
cache waits only for sequences that come before it.
"""

from scorepool.engine.scheduling.kv_budget import KVBudget
from scorepool.engine.scheduling.slice import Slice
from scorepool.engine.sequence import Sequence, Share

MAX_PASSED_OVER = 64  # waiting prefills that do not fit, until no more are offered in this step


class PrefillPolicy:
    """The prefills of one step. Made anew for every step."""

    def __init__(
        self,
        step_tokens: int,
        free_tokens: int,
        kv_budget: KVBudget,
        running: list[Sequence],
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
        self._kv_budget = kv_budget
        self._running = running
        self._may_chunk = may_chunk
        self._share_budget = kv_budget.of_one_share if has_several_shares else None
        self._full_shares: set[Share] = set()
        self._num_passed_over = 0
        self._is_full = False  # a sequence waits for room for its KV cache; so must every later one that needs one

    @property
    def is_exhausted(self) -> bool:
        """True if no further prefill can be admitted in this step."""
        return self._free_tokens <= 0 or self._num_passed_over > MAX_PASSED_OVER

    def has_room(self, sequence: Sequence) -> bool:
        """True if the sequence's KV cache fits beside the running ones, and no earlier sequence waits for room.

        A sequence of a share that has taken its part waits alone: those of other shares pass it.
        """
        if self._is_of_full_share(sequence):
            return False
        self._is_full = self._is_full or not self._kv_budget.fits([*self._running, sequence])
        return not self._is_full

    def _is_of_full_share(self, sequence: Sequence) -> bool:
        if self._share_budget is None or sequence.share in self._full_shares:
            return sequence.share in self._full_shares
        own = [running for running in self._running if running.share == sequence.share]
        if not self._share_budget.fits([*own, sequence]):
            self._full_shares.add(sequence.share)
        return sequence.share in self._full_shares

    def try_admit(self, prefill: Slice) -> Slice | None:
        """Return what runs in this step: the prefill, or its first chunk if it is longer than a step; None if it waits.

        A chunked prefill starts alone.
        """
        if prefill.num_tokens > self._step_tokens:
            is_admitted = self._may_chunk and self.has_room(prefill.sequence)
        else:
            is_admitted = prefill.num_tokens <= self._free_tokens
        if not is_admitted:
            self._num_passed_over += 1
            return None
        admitted = prefill.first(self._free_tokens)
        self._free_tokens -= admitted.num_tokens
        self._may_chunk = False
        if prefill.sequence.sampling:
            self._running.append(prefill.sequence)
        return admitted
