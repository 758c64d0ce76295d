"""The unit of work: consecutive tokens of one sequence, and a step as a list of them.

prefill       given tokens, in one slice or in several chunks
decode        the token that was sampled last: a slice of one
resumption    no token: the last one went through the model in an earlier step, and the next one is sampled now
speculation   the token that was sampled last and k proposed ones: a slice of k + 1
"""

import sys
from bisect import bisect_left
from dataclasses import dataclass, field, replace

from scorepool.engine.errors import EngineError
from scorepool.engine.scheduling.prefix_cache import Prefix
from scorepool.engine.sequence import ProposedToken, Sequence


@dataclass(slots=True, eq=False)
class Slice:
    """Tokens [start, end) of a sequence, which go through the model together."""

    sequence: Sequence
    start: int
    end: int
    proposed_ids: tuple[int, ...] = ()  # the slice's last tokens, which the model may reject
    draft_logprobs: tuple[float, ...] = ()  # of the proposed tokens, if a draft model proposed them
    cached_prefix: Prefix | None = None  # holds the first `start` tokens of the sequence; set on its first slice only
    fills_prefix: Prefix | None = None  # the sequence is internal, and its last slice completes this prefix
    resumes: bool = False  # the sequence was paused

    @classmethod
    def prefill(
        cls, sequence: Sequence, cached_prefix: Prefix | None = None, fills_prefix: Prefix | None = None
    ) -> "Slice":
        """Make the slice of all given tokens that follow the cached prefix."""
        start = cached_prefix.length if cached_prefix else 0
        return cls(sequence, start, sequence.num_prefill, cached_prefix=cached_prefix, fills_prefix=fills_prefix)

    @classmethod
    def decode(
        cls, sequence: Sequence, proposed_ids: tuple[int, ...] = (), draft_logprobs: tuple[float, ...] = ()
    ) -> "Slice":
        """Make the slice of the token that was sampled last, and of proposed ones after it."""
        start = sequence.num_computed
        end = start + 1 + len(proposed_ids)
        return cls(sequence, start, end, proposed_ids=proposed_ids, draft_logprobs=draft_logprobs)

    @classmethod
    def resumption(cls, sequence: Sequence) -> "Slice":
        """Make the slice of a paused sequence, whose constraint now says what may follow."""
        return cls(sequence, sequence.num_computed, sequence.num_computed, resumes=True)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that go through the model: 0 if the cached prefix is the whole prompt."""
        return self.sequence.num_computable(self.start, self.end)

    @property
    def kept(self) -> list[int] | None:
        """The positions of the given tokens that go through the model, if some of the sequence's are left out."""
        kept = self.sequence.kept
        return None if kept is None else kept[bisect_left(kept, self.start) : bisect_left(kept, self.end)]

    def row_of(self, position: int) -> int:
        """Return the index of a token among those of the slice that go through the model."""
        return self.sequence.num_computable(self.start, position)

    @property
    def is_decode(self) -> bool:
        """True if the slice begins with a generated token."""
        return self.end > self.sequence.num_input_tokens and not self.resumes

    @property
    def predictors(self) -> range:
        """Positions whose logits are needed: p predicts token p + 1. The first may be the last of the cached prefix."""
        first = self.start - 1 if self.is_predicted_by_prefix or self.resumes else self.start
        return range(max(first, self.sequence.first_predictor), self.end)

    @property
    def is_predicted_by_prefix(self) -> bool:
        """True if the cached prefix predicts the first reported token."""
        return self.cached_prefix is not None and self.cached_prefix.length == self.sequence.first_predictor + 1

    @property
    def completes_prefill(self) -> bool:
        """True if no given token is left after this slice."""
        return self.end == self.sequence.num_prefill

    @property
    def keeps_cache(self) -> bool:
        """True if the sequence, or one that shares its prefix, continues after this slice."""
        return not self.completes_prefill or self.sequence.sampling is not None or self.fills_prefix is not None

    @property
    def runs_alone(self) -> bool:
        """True if the slice must run in a forward pass of its own: a chunk of a prompt, or a prefix."""
        is_first = self.start == (self.cached_prefix.length if self.cached_prefix else 0)
        is_whole = is_first and self.completes_prefill and self.sequence.kept is None
        return self.fills_prefix is not None or not is_whole

    def first(self, max_tokens: int) -> "Slice":
        """Return the first tokens of this slice, at most `max_tokens`, or those of an image that cannot be cut."""
        if self.num_tokens <= max_tokens:
            return self
        kept = self.kept
        end = self.start + max_tokens if kept is None else kept[max_tokens - 1] + 1
        return replace(self, end=self.sequence.end_beside_images(self.start, end))

    @property
    def rest(self) -> "Slice | None":
        """The given tokens after this slice; None if there are none."""
        if self.end >= self.sequence.num_prefill:
            return None
        return Slice(self.sequence, self.end, self.sequence.num_prefill, fills_prefix=self.fills_prefix)


@dataclass(slots=True)
class SliceResult:
    """The outcome of a slice that gave its sequence new entries."""

    slice: Slice
    num_accepted: int  # leading tokens of the slice that are part of the sequence: all but rejected proposals
    error: EngineError | None = None  # why the sequence cannot continue
    is_complete: bool = False  # no further token is sampled: the last one is not the proposed one, or comes after all
    num_acceptable: int = sys.maxsize  # leading ones of the proposed tokens that may be accepted
    proposed_logprobs: list[float] = field(
        default_factory=list
    )  # of the proposed tokens, if their sequence reports them

    @property
    def num_rejected(self) -> int:
        """The number of proposed tokens that are not part of the sequence."""
        return self.slice.num_tokens - self.num_accepted

    @property
    def proposals(self) -> list[ProposedToken]:
        """Describe each proposed token. Raises ValueError if a logprob is missing."""
        slice_ = self.slice
        first = slice_.end - len(slice_.proposed_ids)
        drafted = slice_.draft_logprobs or (None,) * len(slice_.proposed_ids)
        num_accepted = len(slice_.proposed_ids) - self.num_rejected
        rows = zip(slice_.proposed_ids, drafted, self.proposed_logprobs, strict=True)
        return [
            ProposedToken(
                first + index - slice_.sequence.num_input_tokens, token_id, draft, target, index < num_accepted
            )
            for index, (token_id, draft, target) in enumerate(rows)
        ]

    def accept(self, token_id: int) -> bool:
        """Compare the next sampled token with the proposed one; return True if the one sampled after it counts."""
        proposed_ids = self.slice.proposed_ids
        index = self.num_accepted + len(proposed_ids) - self.slice.num_tokens
        if index < min(len(proposed_ids), self.num_acceptable) and proposed_ids[index] == token_id:
            self.num_accepted += 1
        else:
            self.is_complete = True
        return not self.is_complete


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: its slices, packed into forward passes that run in this order.

    The decoding sequences come first, in one pass, then resumed ones, which need none. In each of the others, either
    all slices keep a cache or none does, and either all are empty or none is.
    """

    forwards: list[list[Slice]]
    leaving: list[Sequence]  # generate their last token in this step; their caches are free once it is launched
    background: list[list[Slice]] = field(default_factory=list)  # passes that no step waits for, of whole prompts

    @property
    def slices(self) -> list[Slice]:
        """All slices of the step, without those of the background."""
        return [slice_ for forward in self.forwards for slice_ in forward]

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to run."""
        return not self.forwards and not self.background

    @property
    def num_prefilled(self) -> int:
        """The prompt tokens of the step, without those of the background."""
        return sum(slice_.num_tokens for slice_ in self.slices if not slice_.is_decode)

    @property
    def decodes(self) -> bool:
        """True if sequences decode."""
        return bool(self.forwards) and self.forwards[0][0].is_decode

    @property
    def verifies(self) -> bool:
        """True if sequences decode proposed tokens."""
        return self.decodes and any(slice_.proposed_ids for slice_ in self.forwards[0])

    @property
    def num_only_decoded(self) -> int:
        """The tokens of a step that only decodes, with the padding of rows that propose fewer; else 0."""
        if len(self.forwards) != 1 or not self.decodes:
            return 0
        return len(self.forwards[0]) * max(slice_.num_tokens for slice_ in self.forwards[0])
