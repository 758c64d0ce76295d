"""Propose tokens for decoding sequences, and choose how many a step verifies. Knows no tensors and no clock.

The model verifies a sequence's proposed tokens in one step: at each position it draws the token that it would have
drawn there, with the same noise, and the first that differs from the proposal is the last one to be kept. So tokens
and logprobs are those of a run without proposals, whatever is proposed.

A step that verifies proposals is read before the next one is scheduled; other steps are not waited for. Where proposed
tokens come from is a source's business: proposals.py.

A model that proposes has to be tried to know whether it is right. What such trials cost is at most a share of the time
that plain steps take: after one that failed, none is made until they have taken enough.
"""

from collections.abc import Callable, Iterable

from scorepool.engine.scheduling.proposals import Proposal, ProposalSource
from scorepool.engine.scheduling.slice import SchedulerOutput, SliceResult
from scorepool.engine.sequence import Sequence
from scorepool.engine.speculation.cost import StepCost, choose_width

_TRIAL_SHARE = 0.02  # of the time of plain steps


class Speculator:
    """What a step costs, and how many tokens of a source it pays to verify."""

    def __init__(
        self, source: ProposalSource, max_width: int, max_proposed: Callable[[int], int], usual: str = "ngram"
    ) -> None:
        """Start without sequences.

        source        proposes tokens
        max_width     proposed tokens of a sequence in a step, at most
        max_proposed  how many tokens the model can verify after position p
        usual         what proposes tokens of a sequence that does not say
        """
        self.cost = StepCost()
        self._source = source
        self._max_width = max_width
        self._max_proposed = max_proposed
        self._usual = usual
        self._has_prefilled = False  # the source, for the step that was scheduled last
        self._spent_s = 0.0  # on proposals since one was accepted, less what trials may take of plain steps

    def may_propose(self, decoding: list[Sequence], max_tokens: int) -> bool:
        """True if the next step is likely to have proposals once the step in flight was read."""
        lengths = [self._num_proposable(sequence, 1) - 1 for sequence in decoding]
        return self._choose_width(decoding, lengths, max_tokens) > 0

    def propose(self, decoding: list[Sequence], max_tokens: int) -> list[Proposal]:
        """Return the proposed tokens of each sequence, all of which were read, for a step of at most `max_tokens`."""
        lengths = [self._num_proposable(sequence, 0) for sequence in decoding]
        width = self._choose_width(decoding, lengths, max_tokens)
        if not width:
            return [Proposal()] * len(decoding)
        proposed = self._source.propose(decoding, [max(0, min(length, width)) for length in lengths])
        self._has_prefilled = self._source.has_prefilled
        return proposed

    def record_cost(self, output: SchedulerOutput, seconds: float) -> None:
        """Add a step that decoded."""
        num_tokens = 0 if self._has_prefilled else output.num_only_decoded
        self.cost.record(num_tokens, seconds, verifies=output.verifies)
        if self._has_prefilled or output.verifies:
            if output.num_only_decoded:  # else a part of the time is that of prompts
                self._spent_s += max(0.0, seconds - self.cost.estimate_plain(len(output.forwards[0])))
        else:
            self._spent_s = max(0.0, self._spent_s - _TRIAL_SHARE * seconds)
        self._has_prefilled = False

    def observe(self, results: Iterable[SliceResult]) -> None:
        """Follow the tokens that sequences have gained."""
        for result in results:
            if self._may_speculate(result.slice.sequence):
                self._source.observe(result)
            if result.num_rejected < len(result.slice.proposed_ids):
                self._spent_s = 0.0

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Drop what is known of sequences that ended."""
        self._source.forget(sequences)

    def _num_proposable(self, sequence: Sequence, num_unread: int) -> int:
        """Count the tokens that a sequence has to propose, and that it may still generate after one more."""
        if not self._may_speculate(sequence) or (self._spent_s and self._source.is_trial(sequence)):
            return 0
        num_worthwhile = self._source.num_worthwhile(sequence, num_unread)
        room = sequence.max_length - 2 - sequence.num_computed + num_unread
        able = self._max_proposed(sequence.num_computed) + num_unread
        asked = self._max_width if sequence.speculation_tokens is None else sequence.speculation_tokens
        return max(0, min(num_worthwhile, room, able, asked + num_unread))

    def _may_speculate(self, sequence: Sequence) -> bool:
        return sequence.proposes_by(self._usual) is not None

    def _choose_width(self, decoding: list[Sequence], lengths: list[int], max_tokens: int) -> int:
        if max(lengths, default=0) <= 0 or self.cost.must_measure:
            return 0
        rates = [
            self._source.rate(sequence) if length > 0 else 0.0
            for sequence, length in zip(decoding, lengths, strict=True)
        ]
        max_width = min(self._max_width, max_tokens // len(decoding) - 1)
        return choose_width(self.cost, zip(rates, lengths, strict=True), max_width)
