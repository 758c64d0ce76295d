"""The sequences that wait, in the order in which they may run. Knows no tensors, no clock.

Sequences of one share keep their order of arrival. Shares take turns, by the tokens that were computed for each,
divided by its weight: a virtual token counter, as in "Fairness in Serving Large Language Models" (Sheng et al., OSDI
2024). So a job of a thousand long sequences does not hold up another tenant's short one.
"""

import heapq
from collections.abc import Iterator

from scorepool.engine.sequence import Sequence, Share


class WaitingSequences:
    """Waiting sequences by share, and how much was computed for each share."""

    def __init__(self) -> None:
        self._by_share: dict[Share, dict[Sequence, None]] = {}  # in order of arrival; no share without a sequence
        self._counters: dict[Share, float] = {}  # tokens that were computed for the share / its weight
        self._last_charged: Share | None = None
        self._may_have_others = False

    def __bool__(self) -> bool:
        return bool(self._by_share)

    @property
    def has_several_shares(self) -> bool:
        """True if one share must leave room to others, which have run, wait, or may come."""
        return self._may_have_others or len({share.name for share in self._counters} - {""}) > 1

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences that wait now, in the order in which they should run."""
        turns = [
            (self._counters[share], number, share, iter(list(sequences)))
            for number, (share, sequences) in enumerate(self._by_share.items())
        ]
        heapq.heapify(turns)
        while turns:
            counter, number, share, sequences = turns[0]
            sequence = next(sequences, None)
            if sequence is None:
                heapq.heappop(turns)
            else:
                counter += (sequence.num_prefill + 1) / share.weight
                heapq.heapreplace(turns, (counter, number, share, sequences))
                yield sequence

    def add(self, sequence: Sequence) -> None:
        """Append a sequence. A share that had none saves up no turns: it begins level with those that wait."""
        share = sequence.share
        self._may_have_others |= share.has_others
        if share not in self._by_share:
            self._counters[share] = max(self._counters.get(share, 0.0), self._level())
            self._by_share[share] = {}
        self._by_share[share][sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is here."""
        if waiting := self._by_share.get(sequence.share):
            waiting.pop(sequence, None)
            if not waiting:
                del self._by_share[sequence.share]

    def charge(self, share: Share, num_tokens: int) -> None:
        """Count tokens that are computed for a share."""
        self._counters[share] = self._counters.get(share, 0.0) + num_tokens / share.weight
        self._last_charged = share

    def _level(self) -> float:
        """Return the lowest counter of the shares that wait; if none does, that of the last that was served."""
        if self._by_share:
            return min(self._counters[share] for share in self._by_share)
        return 0.0 if self._last_charged is None else self._counters[self._last_charged]
