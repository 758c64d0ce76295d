"""Decide which sequences run in the next step. Knows no Redis, no clock, no tensors.

A step computes prompts (prefill) beside one token of every decoding sequence, so that neither waits for the other:

    waiting ──policy──► [ prefill, in chunks ] ──► decoding ──► gone
                               └──(score only)────────────────► gone

Some runners compute prompts in the background, beside the steps: short ones that are only scored, and that continue
from no prefix. Then no decoding sequence waits for these.

A sequence whose constraint does not know in time what may follow is paused, with its KV cache, until it does; the
others go on.

A step is scheduled before the step before it was read, so `schedule` advances sequences as if the step had run: a
sequence is gone from here once its last step is scheduled. Facts that need the generated tokens arrive with `commit`: a
stop string, or proposed tokens that were rejected. While tokens are proposed, or are about to be, `awaits_commit` says
that the next step cannot be scheduled before.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Literal

from scorepool.engine.images import PlacedImage
from scorepool.engine.scheduling import verified
from scorepool.engine.scheduling.kv_budget import KVBudget
from scorepool.engine.scheduling.packing import pack_forwards
from scorepool.engine.scheduling.policy import PrefillPolicy
from scorepool.engine.scheduling.prefill_pace import MIN_TOKENS, PrefillPace
from scorepool.engine.scheduling.prefix_cache import Prefix, PrefixCache
from scorepool.engine.scheduling.proposals import Proposal
from scorepool.engine.scheduling.slice import SchedulerOutput, Slice, SliceResult
from scorepool.engine.scheduling.speculator import Speculator
from scorepool.engine.scheduling.waiting import WaitingSequences
from scorepool.engine.sequence import Sequence

SHARE_IN_BACKGROUND = 4  # of a step's tokens: what is computed in the background at a time
MAX_LEFT = 256  # waiting sequences that steps leave to the background, or it to them, until no more are looked at
SHARE_BESIDE_DECODING = 8  # of a step's tokens: what it prefills beside decoding sequences before steps were measured

Background = Literal["none", "busy", "free"]


class Scheduler:
    """Two containers, waiting and decoding, and at most one chunked prefill between them. And those that are paused."""

    def __init__(
        self,
        max_batch_tokens: int,
        kv_budget: KVBudget,
        prefix_cache: PrefixCache | None = None,
        speculator: Speculator | None = None,
        pace: PrefillPace | None = None,
    ) -> None:
        """Start empty.

        Without a prefix cache, every sequence computes its whole prompt. Without a speculator, nothing is proposed.
        Without a pace, the prompt tokens of a step beside decoding sequences do not follow what steps cost.
        """
        self.max_batch_tokens = max_batch_tokens
        self.kv_budget = kv_budget
        self.prefix_cache = prefix_cache
        self.speculator = speculator
        self.pace = pace or PrefillPace(0.0, max_batch_tokens // SHARE_BESIDE_DECODING)
        self._is_decode_unread = False  # its tokens may come behind the next step: a CPU computes as it launches
        self._num_proposed: dict[Sequence, int] = {}  # in the step that was scheduled last, of those that have any
        self.waiting = WaitingSequences()
        self.chunked_prefill: Slice | None = None  # what is left of a prefill too long for one step
        self.decoding: list[Sequence] = []
        self.paused: dict[Sequence, None] = {}  # in the order in which they were paused

    @property
    def running(self) -> list[Sequence]:
        """The sequences that hold a KV cache between steps."""
        chunked = [self.chunked_prefill.sequence] if self.chunked_prefill else []
        return [*self.decoding, *self.paused, *chunked]

    @property
    def has_work(self) -> bool:
        """True if there is something to schedule."""
        return bool(self.waiting or self.chunked_prefill or self.decoding or self.paused)

    @property
    def awaits_commit(self) -> bool:
        """True if the next step depends on the tokens of the step that was scheduled last."""
        if self._num_proposed:  # also of sequences that have paused since: they may resume in the next step
            return True
        if self.speculator is None or not self.decoding:
            return False
        return self.speculator.may_propose(self.decoding, self._max_decode_tokens)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Append sequences to those that wait."""
        for sequence in sequences:
            self.waiting.add(sequence)
            if self.prefix_cache and sequence.kept is None:  # the caches of others hold every token
                self.prefix_cache.add(sequence)

    def remove(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Remove sequences, whatever their state. One that is not here is ignored.

        Return those whose caches nobody needs any more: these, and the internal one of a prefix that none waits for.
        """
        gone = dict.fromkeys(sequences)
        for sequence in gone:
            self._stop_waiting(sequence)
            self.paused.pop(sequence, None)
        if chunked := self.chunked_prefill:
            if chunked.fills_prefix is not None and not chunked.fills_prefix.num_waiting:
                gone[chunked.sequence] = None
            if chunked.sequence in gone:
                self.chunked_prefill = None
        self.decoding = [sequence for sequence in self.decoding if sequence not in gone]
        if self.speculator:
            self.speculator.forget(gone)
        return list(gone)

    def schedule(self, may_propose: bool = False, background: Background = "none") -> SchedulerOutput:
        """Choose the slices of the next step, and advance their sequences as if it had run.

        `may_propose` says that every earlier step was committed, `background` whether prompts can be computed there.
        """
        if self.prefix_cache:
            self.prefix_cache.evict()
        decode = self._schedule_decode(may_propose)
        num_decode_tokens = sum(slice_.num_tokens for slice_ in decode)
        resumed = [Slice.resumption(sequence) for sequence in self.paused if _may_resume(sequence)]
        beside: list[list[Slice]] = []
        if decode and background == "free":
            beside = pack_forwards([], [], self._schedule_background())
        prefill = self._schedule_prefill(
            num_decode_tokens, leaves_some=bool(beside) or (bool(decode) and background == "busy")
        )
        forwards = pack_forwards(decode, resumed, prefill)
        self._is_decode_unread = bool(decode)
        for slice_ in resumed:
            del self.paused[slice_.sequence]
        return SchedulerOutput(forwards, self._advance(forwards + beside), beside)

    def pause(self, sequences: Iterable[Sequence]) -> None:
        """Let sequences of the step that was scheduled last wait for what may follow, which they have not sampled.

        What was proposed for them is dropped.
        """
        late = dict.fromkeys(sequences)
        if late:
            for sequence in late:
                sequence.num_pauses += 1
                sequence.num_computed -= self._num_proposed.get(sequence, 0)
            self.decoding = [sequence for sequence in self.decoding if sequence not in late]
            self.paused |= late

    def commit(self, results: list[SliceResult]) -> list[Sequence]:
        """Take back the proposed tokens that were rejected. Remove and return those that are done, see `remove`."""
        done: list[Sequence] = []
        for result in results:
            sequence = result.slice.sequence
            sequence.num_computed -= result.num_rejected
            verified.record(result)
            if sequence.is_done:
                verified.take_back_cut(sequence)
                done.append(sequence)
        if self.speculator and results:
            decoding = set(self.decoding)
            self.speculator.observe(result for result in results if result.slice.sequence in decoding)
        return self.remove(done) if done else []  # a stop string ends a sequence that was scheduled again since

    @property
    def _max_decode_tokens(self) -> int:
        """The most tokens of decoding sequences in a step that has proposed ones: half of the budget."""
        return self.max_batch_tokens // 2

    def _schedule_decode(self, may_propose: bool) -> list[Slice]:
        """Make the slices of the decoding sequences."""
        proposed = [Proposal()] * len(self.decoding)
        if self.speculator and may_propose and self.decoding:
            proposed = self.speculator.propose(self.decoding, self._max_decode_tokens)
        pairs = zip(self.decoding, proposed, strict=True)
        self._num_proposed = {sequence: len(ids) for sequence, (ids, _) in pairs if ids}
        return [Slice.decode(sequence, *proposal) for sequence, proposal in zip(self.decoding, proposed, strict=True)]

    @property
    def _max_background_tokens(self) -> int:
        return self.max_batch_tokens // SHARE_IN_BACKGROUND

    def _schedule_background(self) -> list[Slice]:
        """Choose the prompts that are computed beside this step and the next ones."""
        policy = PrefillPolicy(
            step_tokens=self._max_background_tokens,
            free_tokens=self._max_background_tokens,
            kv_budget=self.kv_budget,
            running=(),
            may_chunk=False,
        )
        return self._admit(policy, 0, self._suits_background)

    def _suits_background(self, sequence: Sequence) -> bool:
        """True if a waiting sequence ends with its prompt, and nothing else takes part in computing that."""
        is_only_scored = sequence.sampling is None and sequence.pooling is None
        is_plain = sequence.adapter is None and not sequence.images
        if not (is_only_scored and is_plain and 0 < sequence.num_prefill <= self._max_background_tokens):
            return False
        cache = self.prefix_cache
        return cache is None or (not cache.num_to_load(sequence) and cache.match(sequence) == (None, []))

    def _schedule_prefill(self, num_decode_tokens: int, leaves_some: bool = False) -> list[Slice]:
        """Choose the prefills of the next step; a chunked one that is half way gets at least half of the tokens.

        `leaves_some` leaves those that suit it to the background, which computes now.
        """
        if not self.waiting and self.chunked_prefill is None:
            return []
        budget = max(1, self.max_batch_tokens - num_decode_tokens)
        if self.decoding:
            budget = min(budget, self.pace.max_tokens)
            if not budget:
                return []
        elif self._is_decode_unread:
            budget = min(budget, max(MIN_TOKENS, self.pace.max_tokens))
        chunked = self.chunked_prefill
        policy = PrefillPolicy(
            step_tokens=budget,
            free_tokens=budget // 2 if chunked else budget,
            kv_budget=self.kv_budget,
            running=self.running,
            may_chunk=chunked is None,
            has_several_shares=self.waiting.has_several_shares,
        )
        suits = (lambda sequence: not self._suits_background(sequence)) if leaves_some else None
        slices = self._admit(policy, budget, suits)
        if chunked:
            slices.append(chunked.first(max(1, budget - sum(slice_.num_tokens for slice_ in slices))))
            self._insert_prefix(slices[-1])
        return slices

    def _admit(
        self, policy: PrefillPolicy, max_loaded: int, suits: Callable[[Sequence], bool] | None = None
    ) -> list[Slice]:
        """Offer waiting sequences, and the prefixes that they share, to the policy: those that suit, or all.

        The step loads one stored prefix, or several of at most `max_loaded` tokens together, for sequences that may
        begin. So the time that loading takes, and the memory that it needs beyond the cache's, follow what a step may
        compute. Others wait.
        """
        admitted: list[Slice] = []
        num_loaded = num_left = 0
        for sequence in self.waiting:
            if policy.is_exhausted or num_left > MAX_LEFT:
                break
            if suits is not None and not suits(sequence):
                num_left += 1
                continue
            if sequence.sampling and not policy.has_room(sequence):
                continue
            if self.prefix_cache and (num_tokens := self.prefix_cache.num_to_load(sequence)):
                is_too_much = num_loaded and num_loaded + num_tokens > max_loaded
                rest = sequence.num_prefill - num_tokens
                if is_too_much or not policy.has_tokens(rest) or policy.is_held_up(sequence, rest):
                    policy.pass_over()
                    continue
                num_loaded += num_tokens
                self.prefix_cache.load(sequence)
            prefills = list(self._prefills(sequence))
            if len(prefills) > 1 and policy.is_held_up(sequence, prefills[-1].num_tokens):
                policy.pass_over()  # else prefixes pile up that cannot be evicted while sequences wait for them
                continue
            for prefill in prefills:
                slice_ = policy.try_admit(prefill)
                if slice_ is None:
                    break
                admitted.append(slice_)
                _count_cached(sequence, prefill)
                if self.prefix_cache and not prefill.fills_prefix:
                    self.prefix_cache.count(sequence)
                self._insert_prefix(slice_)
                self._stop_waiting(slice_.sequence)
                if not slice_.completes_prefill:
                    break
        return admitted

    def _prefills(self, sequence: Sequence) -> Iterator[Slice]:
        """Yield the prefills of a waiting sequence: missing prefixes, then itself; none while a prefix is half way."""
        cached: Prefix | None = None
        if self.prefix_cache:
            cached, missing = self.prefix_cache.match(sequence)
            if self.chunked_prefill is not None and self.chunked_prefill.fills_prefix in missing:
                return
            for prefix in missing:
                internal = Sequence(
                    token_ids=prefix.token_ids, share=sequence.share, images=_images_of(sequence, prefix)
                )
                internal.adapter = sequence.adapter
                yield Slice.prefill(internal, cached, fills_prefix=prefix)
                cached = prefix
        yield Slice.prefill(sequence, cached)

    def _advance(self, forwards: list[list[Slice]]) -> list[Sequence]:
        """Advance sequences as if the step had run. Return the generating ones that need no further step."""
        running = self.decoding
        chunked = self.chunked_prefill
        if chunked and any(slice_.sequence is chunked.sequence for slice_ in chain.from_iterable(forwards)):
            self.chunked_prefill = None
        for slice_ in chain.from_iterable(forwards):
            slice_.sequence.num_computed = slice_.end
            self.waiting.charge(slice_.sequence.share, slice_.num_tokens)
            if not slice_.is_decode:
                self.chunked_prefill = slice_.rest or self.chunked_prefill
                if slice_.resumes or (slice_.completes_prefill and slice_.sequence.sampling):
                    running.append(slice_.sequence)
        uncertain = {slice_.sequence for slice_ in chain.from_iterable(forwards) if slice_.proposed_ids}
        leaving: list[Sequence] = []
        self.decoding = []
        for sequence in running:
            leaves = sequence.is_fully_scheduled and sequence not in uncertain
            (leaving if leaves else self.decoding).append(sequence)
        return leaving

    def _insert_prefix(self, slice_: Slice) -> None:
        """Insert the prefix that this slice completes into the cache, so that sequences can continue from it."""
        if self.prefix_cache and slice_.fills_prefix and slice_.completes_prefill:
            self.prefix_cache.insert(slice_.fills_prefix)

    def _stop_waiting(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        if self.prefix_cache:
            self.prefix_cache.remove(sequence)


def _images_of(sequence: Sequence, prefix: Prefix) -> tuple[PlacedImage, ...]:
    """Return the images in the tokens of a prefix; the last one may be cut."""
    begun = [image for image in sequence.images if image.start < prefix.length]
    return tuple(replace(image, end=min(image.end, prefix.length)) for image in begun)


def _count_cached(sequence: Sequence, prefill: Slice) -> None:
    """Count the tokens that a sequence need not compute, given its own prefill or that of a prefix for it."""
    if prefill.fills_prefix:
        sequence.num_prefix_computed += prefill.num_tokens
    elif prefill.cached_prefix:
        sequence.num_cached = max(0, prefill.cached_prefix.length - sequence.num_prefix_computed)


def _may_resume(sequence: Sequence) -> bool:
    return sequence.constraint is None or sequence.constraint.wait(0)
