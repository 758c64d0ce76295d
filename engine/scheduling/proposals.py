"""Where proposed tokens come from: n-grams of a row's own text, or a draft model. Knows no tensors.

To add a source, write a class with the methods of ProposalSource and choose it in EngineCore.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

from scorepool.engine.scheduling.slice import SliceResult
from scorepool.engine.sequence import Sequence
from scorepool.engine.speculation.acceptance import AcceptanceRate
from scorepool.engine.speculation.row import RowForecast


class Proposal(NamedTuple):
    """Tokens that may follow a sequence, and their logprobs under what proposed them, if that is a model."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # natural log; as many as tokens, or none

    def first(self, num_tokens: int) -> "Proposal":
        """Return the first tokens."""
        return Proposal(self.token_ids[:num_tokens], self.logprobs[:num_tokens])


class ProposalSource(Protocol):
    """Proposes tokens for sequences, and follows how many are accepted."""

    @property
    def has_prefilled(self) -> bool:
        """True if the last `propose` computed prompts, which the next one will not do again."""

    def num_worthwhile(self, sequence: Sequence, num_unread: int) -> int:
        """Return how many tokens of a sequence are likely enough to be verified, with `num_unread` that come before."""

    def rate(self, sequence: Sequence) -> float:
        """Return the chance that a proposed token is accepted if all before it are."""

    def is_trial(self, sequence: Sequence) -> bool:
        """True if that chance is a guess, which only a step that verifies can replace."""

    def propose(self, decoding: list[Sequence], lengths: list[int]) -> list[Proposal]:
        """Propose at most `lengths[i]` tokens for decoding sequence i. All of its tokens were read."""

    def observe(self, result: SliceResult) -> None:
        """Follow the tokens that a sequence has gained in a step."""

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Drop what is known of sequences that ended. One that is not known is ignored."""


class NgramSource:
    """Forecasts by what stood after an earlier occurrence of a row's last tokens."""

    has_prefilled = False

    def __init__(self) -> None:
        self._rows: dict[Sequence, RowForecast] = {}

    def num_worthwhile(self, sequence: Sequence, num_unread: int) -> int:
        """Return how much of the forecast, which begins with unread tokens, is likely enough; see ProposalSource."""
        row = self._rows.get(sequence)
        return row.num_worthwhile if row else 0

    def rate(self, sequence: Sequence) -> float:
        """Return how often forecasts of the row were right; see ProposalSource."""
        return self._rows[sequence].rate

    def is_trial(self, sequence: Sequence) -> bool:
        """Return False: forecasts are compared with what came, whether a step verified them or not."""
        return False

    def propose(self, decoding: list[Sequence], lengths: list[int]) -> list[Proposal]:
        """Return the beginnings of the forecasts; see ProposalSource."""
        return [
            Proposal(tuple(self._rows[sequence].tokens[:length])) if length else Proposal()
            for sequence, length in zip(decoding, lengths, strict=True)
        ]

    def observe(self, result: SliceResult) -> None:
        """Compare the forecast with what came, and make the next; see ProposalSource."""
        sequence = result.slice.sequence
        self._rows.setdefault(sequence, RowForecast()).observe(sequence.token_ids)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Drop the forecasts; see ProposalSource."""
        for sequence in sequences:
            self._rows.pop(sequence, None)


class Draft(Protocol):
    """A loaded draft model: see model/draft.py."""

    @property
    def has_prefilled(self) -> bool:
        """True if the last `propose` computed prompts, which the next one will not do again."""

    def propose(self, sequences: list[Sequence], num_tokens: int) -> list[Proposal]:
        """Propose as many tokens for each of these sequences, fewer where the draft's own context ends.

        None for one whose prompt the draft has not read yet: a part of it is read in each step. The caches of all other
        sequences are dropped.
        """

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Drop the caches of these sequences. One without a cache is ignored."""


class DraftSource:
    """Proposes what a draft model generates. The rate of a row is known from its verified proposals only.

    A row begins with what is known of the rows before it. One whose proposals did not pay tries again, more and more
    seldom.
    """

    def __init__(self, find_draft: Callable[[], Draft | None], max_width: int) -> None:
        """Start without sequences. `find_draft` returns the draft model that is loaded now."""
        self._find_draft = find_draft
        self._max_width = max_width
        self._usual = AcceptanceRate()  # of all rows, as if they were one
        self._rows: dict[Sequence, AcceptanceRate] = {}

    @property
    def has_prefilled(self) -> bool:
        """True if the draft model computed prompts in the last `propose`."""
        return self._draft().has_prefilled

    def num_worthwhile(self, sequence: Sequence, num_unread: int) -> int:
        """Return how many tokens are likely enough at the row's rate; see ProposalSource."""
        return num_unread + self._row(sequence).num_worthwhile(self._max_width)

    def rate(self, sequence: Sequence) -> float:
        """Return how often proposals of the row were accepted; see ProposalSource."""
        return self._row(sequence).rate

    def is_trial(self, sequence: Sequence) -> bool:
        """Return True before the row's first proposal and those that are made now and then; see ProposalSource."""
        return self._row(sequence).is_guess

    def propose(self, decoding: list[Sequence], lengths: list[int]) -> list[Proposal]:
        """Run the draft model for all rows that have proposals, the longest length for each; see ProposalSource."""
        lengths = [
            min(length, self._row(sequence).max_proposed) if length else 0
            for sequence, length in zip(decoding, lengths, strict=True)
        ]
        asked = [sequence for sequence, length in zip(decoding, lengths, strict=True) if length]
        made = dict(zip(asked, self._draft().propose(asked, max(lengths)), strict=True))
        return [
            made[sequence].first(length) if length else Proposal()
            for sequence, length in zip(decoding, lengths, strict=True)
        ]

    def observe(self, result: SliceResult) -> None:
        """Follow the acceptance of a row; see ProposalSource."""
        num_proposed = len(result.slice.proposed_ids)
        for known in (self._row(result.slice.sequence), self._usual):
            known.record(num_proposed, num_proposed - result.num_rejected)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Drop rates and the draft's caches; see ProposalSource."""
        gone = [sequence for sequence in sequences if self._rows.pop(sequence, None)]
        if gone:
            self._draft().forget(gone)

    def _draft(self) -> Draft:
        draft = self._find_draft()
        if draft is None:
            raise RuntimeError("the draft model is not loaded")
        return draft

    def _row(self, sequence: Sequence) -> AcceptanceRate:
        return self._rows.setdefault(sequence, replace(self._usual))


class ChosenSource:
    """Asks the source that each sequence chooses: n-grams or the draft model."""

    def __init__(self, sources: Mapping[str, ProposalSource], usual: str) -> None:
        """Start without sequences. `usual` is the source of a sequence that does not say."""
        self._sources = sources
        self._usual = usual
        self.has_prefilled = False

    def num_worthwhile(self, sequence: Sequence, num_unread: int) -> int:
        """Ask the sequence's source; see ProposalSource."""
        return self._source_of(sequence).num_worthwhile(sequence, num_unread)

    def rate(self, sequence: Sequence) -> float:
        """Ask the sequence's source; see ProposalSource."""
        return self._source_of(sequence).rate(sequence)

    def is_trial(self, sequence: Sequence) -> bool:
        """Ask the sequence's source; see ProposalSource."""
        return self._source_of(sequence).is_trial(sequence)

    def propose(self, decoding: list[Sequence], lengths: list[int]) -> list[Proposal]:
        """Let each source propose for its sequences; see ProposalSource."""
        proposed = [Proposal()] * len(decoding)
        self.has_prefilled = False
        for source in self._sources.values():
            own = [
                length if length and self._source_of(sequence) is source else 0
                for sequence, length in zip(decoding, lengths, strict=True)
            ]
            if not any(own):
                continue
            made = source.propose(decoding, own)
            self.has_prefilled = self.has_prefilled or source.has_prefilled
            proposed = [new if length else old for new, old, length in zip(made, proposed, own, strict=True)]
        return proposed

    def observe(self, result: SliceResult) -> None:
        """Tell the sequence's source; see ProposalSource."""
        self._source_of(result.slice.sequence).observe(result)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Tell all sources; see ProposalSource."""
        gone = list(sequences)
        for source in self._sources.values():
            source.forget(gone)

    def _source_of(self, sequence: Sequence) -> ProposalSource:
        return self._sources[sequence.proposes_by(self._usual) or self._usual]
