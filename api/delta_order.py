"""Put the deltas of one job in order: those of its latest run, each token once, without a gap. Pure.

    repeated     a write whose reply was lost, a repetition for another client    passes: the reader drops what it has
    late         of an earlier run, from a worker that woke after the takeover    does not pass
    after a gap  entries were lost, for example when Redis was restarted          does not pass until the gap is filled

The first delta of a later run begins every sequence again at index 0. The reader compares the tokens of the new run
with those that it has sent, and what computed them: other weights may generate the same tokens.
"""

from collections.abc import Sequence

from scorepool import wire


class DeltaOrder:
    """Hold how many tokens of each sequence have passed, and in which run."""

    def __init__(self, run: int = 0, counts: Sequence[int] = ()) -> None:
        self.run = run  # 0: not known yet
        self.missing: dict[int, int] = {}  # index of the first missing token, by sequence
        self.weights: str | None = None  # that computed what has passed; None: nothing has, or it is not known
        self._counts = dict(enumerate(counts))

    def admit(self, delta: wire.TokenDelta) -> bool:
        """True if the delta repeats or continues what has passed in the latest run."""
        if delta.run:  # else its worker does not tell runs apart, and the reader compares the tokens
            if delta.run < self.run:
                return False
            if delta.run > self.run:
                self.begin_again()
                self.run = delta.run
        count = self._counts.get(delta.sequence, 0)
        if delta.first > count:
            self.missing[delta.sequence] = count
            return False
        self.missing.pop(delta.sequence, None)
        self._counts[delta.sequence] = max(count, delta.first + len(delta.token_ids))
        return True

    def agrees(self, weights: str | None) -> bool:
        """Take what computed tokens or a result. False if other weights computed what has passed."""
        if weights is not None and self.weights is not None:
            return weights == self.weights
        self.weights = self.weights or weights
        return True

    def begin_again(self) -> None:
        """Expect every sequence from index 0 on."""
        self._counts, self.missing = {}, {}
