"""The other ranks: run what rank 0 says."""

from weakref import WeakValueDictionary

import mlx.core as mx
from msgspec import msgpack

from scorepool.engine.model.batch import BatchRunner
from scorepool.engine.model.ranks import messages
from scorepool.engine.model.ranks.group import RankGroup
from scorepool.engine.scheduling.prefix_cache import Prefix
from scorepool.engine.scheduling.slice import Slice
from scorepool.engine.sequence import Sampling, Sequence


class Follower:
    """A rank's batch, driven by rank 0. It holds sequences and prefixes as long as its batch or rank 0 does."""

    def __init__(self, batch: BatchRunner, ranks: RankGroup) -> None:
        """Start without sequences."""
        self._batch = batch
        self._ranks = ranks
        self._sequences: WeakValueDictionary[int, Sequence] = WeakValueDictionary()  # the batch holds those it needs
        self._prefixes: dict[int, Prefix] = {}

    def run(self) -> None:
        """Run what rank 0 sends until it closes. Raises RuntimeError if a rank has gone."""
        while True:
            message = msgpack.decode(self._ranks.receive(), type=messages.Message)
            for number in message.dropped_prefixes:
                self._prefixes.pop(number, None)
            if isinstance(message.call, messages.Close):
                return
            self._run(message.call)

    def _run(self, call: messages.Call) -> None:
        match call:
            case messages.Prefill(slices):
                mx.async_eval(self._batch.prefill([self._slice(one) for one in slices]))
            case messages.Decode(slices, last_ids):
                rows = [self._slice(one) for one in slices]
                mx.async_eval(self._batch.decode(rows, mx.array(last_ids, dtype=mx.int32)))
            case messages.DropRejected(num_rejected):
                known = self._sequences  # without those that were released before their last step was read
                self._batch.drop_rejected({known[number]: num for number, num in num_rejected if number in known})
            case messages.Pause(numbers):
                self._batch.pause(self._known(numbers))
            case messages.Resume(numbers):
                self._batch.resume(self._known(numbers))
            case messages.Release(numbers):
                self._batch.release(self._known(numbers))

    def _known(self, numbers: list[int]) -> list[Sequence]:
        return [self._sequences[number] for number in numbers if number in self._sequences]

    def _slice(self, one: messages.SliceMessage) -> Slice:
        sequence = self._sequences.get(one.sequence.number)
        if sequence is None:
            self._sequences[one.sequence.number] = sequence = _new_sequence(one.sequence)
        sequence.token_ids[one.start : one.start + len(one.token_ids)] = one.token_ids
        return Slice(
            sequence,
            one.start,
            one.end,
            proposed_ids=one.proposed_ids,
            cached_prefix=self._prefix(one.cached_prefix),
            fills_prefix=self._prefix(one.fills_prefix),
        )

    def _prefix(self, one: messages.PrefixMessage | None) -> Prefix | None:
        if one is None:
            return None
        return self._prefixes.setdefault(one.number, Prefix(None, [0] * one.length))


def _new_sequence(one: messages.SequenceMessage) -> Sequence:
    """Make a sequence whose tokens are not known yet."""
    sequence = Sequence(
        token_ids=[0] * one.num_input_tokens,
        score_from=one.score_from,
        sampling=Sampling(max_tokens=1) if one.generates else None,
        classify=one.pooled_position is not None,
        pooling=one.pooling,
    )
    if one.pooled_position is not None:
        sequence.pooled_position = one.pooled_position
    return sequence
