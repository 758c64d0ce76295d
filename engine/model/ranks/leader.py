"""Rank 0: tell the other ranks what to run, and run it too."""

from itertools import count
from weakref import WeakKeyDictionary, WeakValueDictionary

import mlx.core as mx
from msgspec import msgpack

from scorepool.engine.model.batch import BatchRunner
from scorepool.engine.model.ranks import messages
from scorepool.engine.model.ranks.group import RankGroup
from scorepool.engine.scheduling.prefix_cache import Prefix
from scorepool.engine.scheduling.slice import Slice
from scorepool.engine.sequence import Sequence


class LeadingBatch:
    """A batch that runs on all ranks; see BatchRunner.

    Each call begins to compute before the next one is sent: the ranks must exchange their partial sums in one order.
    """

    def __init__(self, batch: BatchRunner, ranks: RankGroup) -> None:
        """Start without sequences. `batch` is that of this rank."""
        self.can_share, self.can_speculate, self.on_prompt = batch.can_share, batch.can_speculate, batch.on_prompt
        self._batch = batch
        self._ranks = ranks
        self._numbers = count()
        self._sequences: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._prefixes: WeakValueDictionary[int, Prefix] = WeakValueDictionary()
        self._prefix_numbers: WeakKeyDictionary[Prefix, int] = WeakKeyDictionary()
        self._filled: set[int] = set()  # the prefixes whose caches the others hold
        self._unfilled: set[int] = set()  # those that the last call has only begun, and that may never be filled

    def prefill(self, slices: list[Slice]) -> mx.array:
        """Run slices on all ranks; see BatchRunner."""
        self._send(messages.Prefill([self._describe(slice_) for slice_ in slices]))
        hidden = self._batch.prefill(slices)
        mx.async_eval(hidden)
        for slice_ in slices:
            if slice_.fills_prefix is not None:
                numbers = self._unfilled if slice_.fills_prefix.cache is None else self._filled
                numbers.add(self._number_of_prefix(slice_.fills_prefix))
        return hidden

    def decode(self, slices: list[Slice], last_ids: mx.array) -> mx.array:
        """Run the next tokens on all ranks, once the last ones are known; see BatchRunner."""
        self._send(messages.Decode([self._describe(slice_) for slice_ in slices], last_ids.tolist()))  # type: ignore[arg-type]
        hidden = self._batch.decode(slices, last_ids)
        mx.async_eval(hidden)
        return hidden

    def max_proposed(self, position: int) -> int:
        """Return what this rank's batch takes; see BatchRunner."""
        return self._batch.max_proposed(position)

    def drop_rejected(self, num_rejected: dict[Sequence, int]) -> None:
        """Drop rejected tokens on all ranks; see BatchRunner."""
        self._send(messages.DropRejected([(self._sequences[one], num) for one, num in num_rejected.items()]))
        self._batch.drop_rejected(num_rejected)

    def pause(self, sequences: list[Sequence]) -> None:
        """Pause sequences on all ranks; see BatchRunner."""
        self._send(messages.Pause([self._sequences[sequence] for sequence in sequences]))
        self._batch.pause(sequences)

    def resume(self, sequences: list[Sequence]) -> None:
        """Resume sequences on all ranks; see BatchRunner."""
        self._send(messages.Resume([self._sequences[sequence] for sequence in sequences]))
        self._batch.resume(sequences)

    def release(self, sequences: list[Sequence]) -> None:
        """Drop the caches of sequences on all ranks; see BatchRunner."""
        if known := [self._sequences[sequence] for sequence in sequences if sequence in self._sequences]:
            self._send(messages.Release(known))
        self._batch.release(sequences)

    def close(self) -> None:
        """Let the other ranks end."""
        self._send(messages.Close())

    def _send(self, call: messages.Call) -> None:
        dropped = [number for number in self._filled if self._is_dropped(number)]
        self._filled.difference_update(dropped)
        self._ranks.send(msgpack.encode(messages.Message(call, [*dropped, *self._unfilled])))
        self._unfilled.clear()

    def _is_dropped(self, number: int) -> bool:
        prefix = self._prefixes.get(number)
        return prefix is None or prefix.cache is None

    def _describe(self, slice_: Slice) -> messages.SliceMessage:
        sequence = slice_.sequence
        if sequence not in self._sequences:
            self._sequences[sequence] = next(self._numbers)
        return messages.SliceMessage(
            sequence=messages.SequenceMessage(
                number=self._sequences[sequence],
                num_input_tokens=sequence.num_input_tokens,
                score_from=sequence.score_from,
                generates=sequence.sampling is not None,
                pooled_position=sequence.pooled_position if sequence.classify else None,
                pooling=sequence.pooling,
            ),
            start=slice_.start,
            end=slice_.end,
            token_ids=[] if slice_.is_decode else sequence.token_ids[slice_.start : slice_.end],
            proposed_ids=slice_.proposed_ids,
            cached_prefix=self._describe_prefix(slice_.cached_prefix),
            fills_prefix=self._describe_prefix(slice_.fills_prefix),
        )

    def _describe_prefix(self, prefix: Prefix | None) -> messages.PrefixMessage | None:
        return None if prefix is None else messages.PrefixMessage(self._number_of_prefix(prefix), prefix.length)

    def _number_of_prefix(self, prefix: Prefix) -> int:
        if prefix not in self._prefix_numbers:
            self._prefix_numbers[prefix] = number = next(self._numbers)
            self._prefixes[number] = prefix
        return self._prefix_numbers[prefix]
