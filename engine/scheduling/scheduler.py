"""Which rows run in the next step. No Redis, no clock, no tensors.

A step computes prompts (prefill) beside one token of every decoding row, so that neither waits for the other:

    waiting ──admit──► [ prefill, in chunks ] ──► decoding ──► gone
                              └──(score only)──────────────────► gone

A step is planned before the one before it has been read, so a row goes by what was launched: it has left here
when its last step is launched. What only the tokens tell, a stop string, the engine tells by `remove`.

Waiting rows are admitted in order of arrival. One that does not fit now is passed over, but never overtaken
for good: the first waiting row that may run is always admitted unless a long row is half way, and a row that
needs a place among `max_running_rows`, or room for its cache, waits only for rows that came before it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from scorepool.engine.scheduling.prefix_cache import Prefix, PrefixCache
from scorepool.engine.sequence import Sequence

SHARE_BESIDE_DECODING = 8  # rows that decode wait for a prefill of no more than this part of the budget
MOST_PASSED_OVER = 64  # waiting rows that do not fit, until no more are looked at in this step
LEAST_FORWARD_TOKENS = 256  # fewer in a forward leave the machine idle: it takes rows in at any padding
LEAST_SHARED_TOKENS = 64  # fewer on one prefix go with others, on a prefix each
MOST_PADDING = 1 / 8  # of a row, in a forward of LEAST_FORWARD_TOKENS
MOST_KEYS = 16_384  # rows times tokens, of a forward whose rows go on from prefix_cache: a layer has keys of them all


@dataclass(frozen=True, slots=True)
class Chunk:
    """Given tokens [start, end) of a row, which go through the model together."""

    sequence: Sequence
    start: int
    end: int
    base: Prefix | None = None  # what the row's first chunk goes on from: its first `start` tokens
    into: Prefix | None = None  # the row is no caller's: its last chunk completes this prefix

    @property
    def predictors(self) -> range:
        """Positions whose logits are asked for: p predicts token p + 1. The base's last token may be the first."""
        first = self.start - 1 if self.is_predicted_by_base else self.start
        return range(max(first, self.sequence.first_predictor), self.end)

    @property
    def is_predicted_by_base(self) -> bool:
        """The first entry is: its hidden state is the base's last."""
        return self.base is not None and self.base.length == self.sequence.first_predictor + 1

    @property
    def is_last(self) -> bool:
        return self.end == self.sequence.num_prefill

    @property
    def leaves_cache(self) -> bool:
        """The row, or one that shares it, goes on after this chunk."""
        return not self.is_last or self.sequence.sampling is not None or self.into is not None

    @property
    def is_part(self) -> bool:
        """Of a prompt in several chunks, or of a prefix: it has a forward of its own."""
        is_first = self.start == (self.base.length if self.base else 0)
        return self.into is not None or not (is_first and self.is_last)

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the decoding rows are one forward, then each list of chunks is a padded one.

    Of the chunks in one forward either all leave a cache or none does, and either all are empty or none is.
    """

    decode: list[Sequence] = field(default_factory=list)
    prefill: list[list[Chunk]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.decode and not self.prefill


@dataclass(frozen=True, slots=True)
class Part:
    """A row, or a prefix that rows share: what is computed in one chunk if it fits."""

    sequence: Sequence
    base: Prefix | None = None
    into: Prefix | None = None

    @property
    def num_tokens(self) -> int:
        return self.sequence.num_prefill - (self.base.length if self.base else 0)

    def chunk(self, max_tokens: int) -> Chunk:
        """The next."""
        is_first = self.sequence.num_computed == 0
        start = self.base.length if self.base and is_first else self.sequence.num_computed
        end = min(start + max_tokens, self.sequence.num_prefill)
        return Chunk(self.sequence, start, end, self.base if is_first else None, self.into)


class Scheduler:
    def __init__(
        self,
        max_batch_tokens: int,
        max_running_rows: int,
        max_cached_tokens: int,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """`prefix_cache` None: every row is computed by itself."""
        self.max_batch_tokens = max_batch_tokens
        self.max_running_rows = max_running_rows
        self.max_cached_tokens = max_cached_tokens  # rows that hold a cache, times the longest that one may get
        self.prefix_cache = prefix_cache
        self.waiting: dict[Sequence, None] = {}  # in order of arrival
        self.long: Part | None = None  # too long for one step, and half way
        self.decoding: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.long or self.decoding)

    def add(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self.waiting[sequence] = None
            if self.prefix_cache:
                self.prefix_cache.add(sequence)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Wherever they are. A row that is not here is passed over."""
        gone = set(sequences)
        for sequence in gone:
            self._stop_waiting(sequence)
        if self.long is not None and self.long.sequence in gone:
            self.long = None
        self.decoding = [sequence for sequence in self.decoding if sequence not in gone]

    def plan(self) -> Plan:
        """The next step. Nothing moves until `advance`, except that admitted rows stop waiting."""
        if self.prefix_cache:
            self.prefix_cache.evict()
        share = SHARE_BESIDE_DECODING if self.decoding else 1
        budget = max(1, self.max_batch_tokens // share - len(self.decoding))
        long = self.long
        admitted = self._admit(budget // 2 if long else budget, budget)
        if long is not None:
            chunk = long.chunk(max(1, budget - sum(chunk.num_tokens for chunk in admitted)))
            self._note(chunk)
            admitted.append(chunk)
        return Plan(list(self.decoding), forwards(admitted))

    def advance(self, plan: Plan) -> list[Sequence]:
        """After the launch: move its rows on. Returns those that have generated all they may and decode no more."""
        chunks = [chunk for forward in plan.prefill for chunk in forward]
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.end
        for sequence in plan.decode:
            sequence.num_computed += 1
        if self.long is not None and self.long.sequence.num_computed == self.long.sequence.num_prefill:
            self.long = None
        rows = self.decoding + [chunk.sequence for chunk in chunks if chunk.is_last and chunk.sequence.sampling]
        self.decoding = [sequence for sequence in rows if not sequence.is_fully_scheduled]
        return [sequence for sequence in rows if sequence.is_fully_scheduled]

    def _admit(self, budget: int, whole_budget: int) -> list[Chunk]:
        """Chunks of waiting rows, and of the prefix_cache that they share."""
        admitted: list[Chunk] = []
        running = self.decoding + ([self.long.sequence] if self.long else [])
        num_passed_over = 0
        is_full = False  # a row waits for a place, and those behind it that need one do too
        for sequence in list(self.waiting):
            if budget <= 0 or num_passed_over > MOST_PASSED_OVER:
                break
            if sequence.sampling and (is_full or not self._has_place([*running, sequence])):
                is_full = True
                continue
            for part in self._parts(sequence):
                is_long = part.num_tokens > whole_budget
                if is_long and (admitted or self.long):
                    num_passed_over += 1  # it starts alone, once no other is half way
                    break
                if is_long and (is_full or not self._has_place([*running, part.sequence])):
                    num_passed_over += 1
                    is_full = True
                    break
                if not is_long and part.num_tokens > budget:
                    num_passed_over += 1
                    break
                chunk = part.chunk(budget)
                budget -= chunk.num_tokens
                admitted.append(chunk)
                self._note(chunk)
                self._stop_waiting(part.sequence)
                if is_long:
                    self.long = part
                    return admitted
                if part.sequence.sampling:
                    running.append(part.sequence)
        return admitted

    def _has_place(self, rows: list[Sequence]) -> bool:
        """Room for the caches of these rows. A row alone always has: it was refused otherwise."""
        if len(rows) == 1:
            return True
        longest = max(sequence.max_length for sequence in rows)
        return len(rows) <= self.max_running_rows and longest * len(rows) <= self.max_cached_tokens

    def _parts(self, sequence: Sequence) -> Iterator[Part]:
        """What is to be computed for a row, in order. Nothing while a prefix of it is half way."""
        base: Prefix | None = None
        if self.prefix_cache:
            base, missing = self.prefix_cache.match(sequence)
            if self.long is not None and self.long.into in missing:
                return
            for prefix in missing:
                yield Part(Sequence(token_ids=prefix.token_ids), base, prefix)
                base = prefix
        yield Part(sequence, base)

    def _note(self, chunk: Chunk) -> None:
        """Rows may go on from a prefix that this step completes."""
        if self.prefix_cache and chunk.into and chunk.is_last:
            self.prefix_cache.insert(chunk.into)

    def _stop_waiting(self, sequence: Sequence) -> None:
        self.waiting.pop(sequence, None)
        if self.prefix_cache:
            self.prefix_cache.remove(sequence)


def forwards(chunks: list[Chunk]) -> list[list[Chunk]]:
    """What goes through the model together: chunks of one kind and about one length, on one prefix if they are many.

    A prefix comes before the rows that go on from it. An empty chunk is a row whose prefix is its whole prompt.
    """
    found = [[chunk] for chunk in chunks if chunk.is_part]
    empty = [chunk for chunk in chunks if not chunk.is_part and not chunk.num_tokens]
    found += [kind for leaves in (False, True) if (kind := [chunk for chunk in empty if chunk.leaves_cache is leaves])]
    whole = [chunk for chunk in chunks if not chunk.is_part and chunk.num_tokens]
    of_base: dict[Prefix, list[Chunk]] = {}
    for chunk in whole:
        if chunk.base and not chunk.leaves_cache:
            of_base.setdefault(chunk.base, []).append(chunk)
    few: list[Chunk] = []
    for rows in of_base.values():
        if sum(chunk.num_tokens for chunk in rows) < LEAST_SHARED_TOKENS:
            few += rows
        else:
            found += _of_like_length(rows)
    found += _of_like_length(few)
    found += _of_like_length([chunk for chunk in whole if not chunk.base and not chunk.leaves_cache])
    found += _of_like_length([chunk for chunk in whole if chunk.leaves_cache])
    return found


def _of_like_length(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Longest first. A forward is a rectangle, its rows padded to the first of them."""
    found: list[list[Chunk]] = []
    for chunk in sorted(chunks, key=lambda chunk: -chunk.num_tokens):
        if found and _joins(chunk, found[-1]):
            found[-1].append(chunk)
        else:
            found.append([chunk])
    return found


def _joins(chunk: Chunk, rows: list[Chunk]) -> bool:
    longest = rows[0].num_tokens
    padding = longest - chunk.num_tokens
    if longest * len(rows) >= LEAST_FORWARD_TOKENS and padding > MOST_PADDING * longest:
        return False
    num_keys = max(row.end for row in [*rows, chunk])
    return not chunk.base or num_keys * (len(rows) + 1) <= MOST_KEYS
