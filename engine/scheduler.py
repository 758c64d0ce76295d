"""Which rows run in the next step. No Redis, no clock, no tensors.

A step computes prompts (prefill) beside one token of every decoding row, so that neither waits for the other:

    waiting ──admit──► [ prefill, in chunks ] ──► decoding ──► done
                              └──(score only)──────────────────► done

Waiting rows are admitted in order of arrival. One that does not fit now is passed over, but never overtaken
for good: the first waiting row that may run is always admitted unless a long row is half way, and a row that
needs a place among `max_running_rows` waits only for rows that came before it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Given tokens [start, end) of a row, which go through the model together."""

    sequence: Sequence
    start: int
    end: int

    @property
    def predictors(self) -> range:
        """Positions in the chunk whose logits are asked for: p predicts token p + 1.

        The first is that of token `score_from`, or the last given token where only generated tokens are
        reported.
        """
        sequence = self.sequence
        wanted = sequence.num_given if sequence.score_from is None else sequence.score_from
        return range(max(self.start, wanted - 1), self.end)

    @property
    def is_last(self) -> bool:
        return self.end == self.sequence.num_prefill

    @property
    def leaves_cache(self) -> bool:
        """The row goes on after this chunk."""
        return not self.is_last or self.sequence.sampling is not None


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the decoding rows are one forward, then each list of chunks is a padded one."""

    decode: list[Sequence] = field(default_factory=list)
    prefill: list[list[Chunk]] = field(default_factory=list)


class Scheduler:
    def __init__(self, max_batch_tokens: int, max_running_rows: int) -> None:
        self.max_batch_tokens = max_batch_tokens
        self.max_running_rows = max_running_rows
        self.waiting: dict[Sequence, None] = {}  # in order of arrival
        self.long_row: Sequence | None = None  # its prompt is half way
        self.decoding: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.long_row or self.decoding)

    def add(self, sequences: Iterable[Sequence]) -> None:
        self.waiting.update(dict.fromkeys(sequences))

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Wherever they are. A row that is not here is passed over."""
        gone = set(sequences)
        for sequence in gone:
            self.waiting.pop(sequence, None)
        if self.long_row in gone:
            self.long_row = None
        self.decoding = [sequence for sequence in self.decoding if sequence not in gone]

    def plan(self) -> Plan:
        """The next step. Nothing moves until `advance`, except that admitted rows stop waiting."""
        decode = list(self.decoding)
        budget = max(1, self.max_batch_tokens - len(decode))
        forwards = []
        if self.long_row is not None:
            resumed = self._resume(self.long_row, budget)
            budget -= resumed.end - resumed.start
            forwards.append([resumed])
        if admitted := self._admit(budget):
            forwards.append(admitted)
        return Plan(decode, forwards)

    def advance(self, plan: Plan) -> list[Sequence]:
        """After the step: move its rows on, and return those that are done and now gone from here."""
        chunks = [chunk for forward in plan.prefill for chunk in forward]
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.end
        for sequence in plan.decode:
            sequence.num_computed += 1
        if self.long_row is not None and self.long_row.num_computed == self.long_row.num_prefill:
            self.long_row = None
        finished_prompts = [chunk.sequence for chunk in chunks if chunk.is_last]
        rows = self.decoding + finished_prompts
        self.decoding = [sequence for sequence in rows if not sequence.is_done]
        return [sequence for sequence in rows if sequence.is_done]

    def _resume(self, sequence: Sequence, budget: int) -> Chunk:
        """The next chunk of the long row: half of the budget where others wait."""
        size = max(1, budget // 2) if self.waiting else budget
        start = sequence.num_computed
        return Chunk(sequence, start, min(start + size, sequence.num_prefill))

    def _admit(self, budget: int) -> list[Chunk]:
        """Chunks of waiting rows. Padding counts: the forward is a rectangle, rows by the longest of them."""
        whole_budget = max(1, self.max_batch_tokens - len(self.decoding))
        places = self.max_running_rows - len(self.decoding) - (self.long_row is not None)
        admitted: list[Chunk] = []
        longest = 0
        for sequence in self.waiting:
            if longest * (len(admitted) + 1) > budget:
                break
            size = sequence.num_prefill
            is_long = size > whole_budget
            if is_long and (admitted or self.long_row is not None):
                continue  # starts alone, once no other long row is half way
            if places <= 0 and (is_long or sequence.sampling is not None):
                continue
            if is_long:
                self.long_row = sequence
                admitted = [Chunk(sequence, 0, min(size, budget))]
                break
            if max(longest, size) * (len(admitted) + 1) > budget:
                continue
            longest = max(longest, size)
            places -= sequence.sampling is not None
            admitted.append(Chunk(sequence, 0, size))
        for chunk in admitted:
            del self.waiting[chunk.sequence]
        return admitted
