"""Find out which tokens of long prompts matter, before their sequences wait for the model. Knows no tensors.

    add ──► [ selection: chunks of one prompt at a time through the draft model ] ──► Scheduler.add

A sequence that asks for `keep_pct` waits here until its prompt went through the draft model, a chunk in each step of
the engine, so that other sequences go on. Sequences with the same prompt wait for one run. Short prompts do not come
here: all of their tokens are computed.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from scorepool.engine.scheduling.kept_tokens import MIN_PROMPT_TOKENS, choose_kept
from scorepool.engine.sequence import Sequence


class PromptScorer(Protocol):
    """Says how much each token of a prompt matters: see model/prompt_scorer.py."""

    def begin(self, token_ids: list[int]) -> Any:
        """Return a run of a prompt, nothing of which was computed."""

    def advance(self, run: Any) -> list[float] | None:
        """Compute the next chunk of a run. Return a score for each token after the last one. Waits for it."""


def selects(sequence: Sequence) -> bool:
    """True if some tokens of the sequence's prompt are left out."""
    return sequence.keep_pct is not None and sequence.num_input_tokens >= MIN_PROMPT_TOKENS


class PromptSelection:
    """The sequences whose kept tokens are not known yet, first come, first served."""

    def __init__(self, find_scorer: Callable[[], PromptScorer | None]) -> None:
        """Start empty. `find_scorer` returns the scorer of the model that is loaded now."""
        self._find_scorer = find_scorer
        self._waiting: dict[Sequence, None] = {}
        self._current: Sequence | None = None  # whose prompt runs; it may have been removed since
        self._run: Any = None  # the scorer's

    @property
    def has_work(self) -> bool:
        """True if a sequence waits."""
        return bool(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Append a sequence."""
        self._waiting[sequence] = None

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Remove sequences. One that is not here is ignored."""
        for sequence in sequences:
            self._waiting.pop(sequence, None)
        if self._current is not None and not self._find_equal(self._current):
            self._current = self._run = None

    def advance(self) -> list[Sequence]:
        """Compute one chunk. Return the sequences whose kept tokens are known now."""
        current = self._current or next(iter(self._waiting), None)
        if current is None:
            return []
        scorer = self._find_scorer()
        if scorer is None:
            raise RuntimeError("no draft model is loaded that can say which tokens matter")
        if self._current is None:
            self._current, self._run = current, scorer.begin(current.token_ids)
        equal = self._find_equal(current)
        for sequence in equal:
            sequence.is_read_by_draft = True
        scores = scorer.advance(self._run)
        if scores is None:
            return []
        self.remove(equal)
        for sequence in equal:
            sequence.kept = choose_kept(scores, sequence.keep_pct or 0)
        return equal

    def _find_equal(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences that wait with the same prompt."""
        return [other for other in self._waiting if other.token_ids == sequence.token_ids]
