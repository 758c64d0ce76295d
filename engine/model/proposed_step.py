"""A step of decoding rows that has proposed tokens, until it is known which of them are kept."""

from itertools import groupby

import mlx.core as mx

from scorepool.engine.model import kv_cache, kv_rollback
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.kv_cache import Cache
from scorepool.engine.scheduling.slice import Slice
from scorepool.engine.sequence import Sequence


class ProposedStep:
    """The tokens of such a step, right-padded to the most proposed ones, and the states before it."""

    def __init__(self, slices: list[Slice], last_ids: mx.array, cache: Cache) -> None:
        """Start before the step runs. `slices` are those of all decoding rows, last_ids [rows] their last tokens."""
        proposed = [slice_.proposed_ids for slice_ in slices]
        self.width = width = max(map(len, proposed))
        rows = [[*ids, *[0] * (width - len(ids))] for ids in proposed]
        self.token_ids = mx.concatenate([last_ids[:, None], mx.array(rows, dtype=last_ids.dtype)], axis=1)
        self._numbers = {slice_.sequence: number for number, slice_ in enumerate(slices)}
        self._num_pads = [width - len(ids) for ids in proposed]
        self._states = kv_rollback.copy_states(cache)
        kv_rollback.put_in_order(cache)

    def num_proposed(self, sequence: Sequence) -> int:
        """Count the proposed tokens of a row. One that joined since has none."""
        number = self._numbers.get(sequence)
        return 0 if number is None else self.width - self._num_pads[number]

    def num_dropped(self, sequence: Sequence, num_rejected: int) -> int:
        """Count the tokens that a row drops: rejected ones and padding. A row that joined since has none."""
        number = self._numbers.get(sequence)
        return 0 if number is None else self._num_pads[number] + num_rejected

    def recompute_states(
        self,
        backbone: BackboneAndHead,
        cache: Cache,
        decoding: list[Sequence],
        dropped: dict[Sequence, int],
        pads: bool,
    ) -> None:
        """Let the states of rows that drop tokens go through the others once more. Call it before these are dropped.

        dropped  the number of such tokens of each row
        pads     rows that keep different numbers of tokens can run together
        """
        if not self._states:
            return
        row_of = {sequence: row for row, sequence in enumerate(decoding)}
        kept = [(self.width + 1 - count, sequence) for sequence, count in dropped.items() if count]
        kept.sort(key=lambda pair: (pair[0], row_of[pair[1]]))
        for _, group in groupby(kept, lambda pair: 0 if pads else pair[0]):
            counts, sequences = zip(*group, strict=True)
            rows = [row_of[sequence] for sequence in sequences]
            numbers = [self._numbers[sequence] for sequence in sequences]
            before = kv_rollback.rows_before(cache, self.width + 1, rows, self._states, numbers)
            kv_cache.set_padding(before, set())
            if counts[0] < counts[-1]:
                kv_cache.begin_right_padding(before, list(counts))
            token_ids = self.token_ids[mx.array(numbers), : counts[-1]]
            backbone.forward_hidden(token_ids, before, list(sequences))
            kv_rollback.replace_states(cache, rows, before)
        if kept:
            mx.eval(kv_cache.arrays(kv_rollback.copy_states(cache)))  # now, as a part of the time that the step takes
