"""Score the completion or the text of each row. A RowScoring of tasks.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scorepool import wire
from scorepool.files.rows import Values
from scorepool.files.scoring.columns import ScoreColumns
from scorepool.files.scoring.measures import RANKS, SCORE_COLUMNS, TOKEN_COLUMNS, score_columns


@dataclass(frozen=True, slots=True)
class CompletionScoring:
    """One item per row."""

    source: ScoreColumns
    with_tokens: bool
    averaged: tuple[str, ...] = ()
    items_per_row: int = 1

    @property
    def options(self) -> dict[str, Any]:
        return {
            "--prompt": self.source.prompt,
            "--completion": self.source.completion,
            "--tokens": self.with_tokens,
        }

    @property
    def text_columns(self) -> tuple[str, ...]:
        return self.source.names

    @property
    def new_columns(self) -> tuple[str, ...]:
        return (*SCORE_COLUMNS, *((*TOKEN_COLUMNS, RANKS) if self.with_tokens else ()))

    def items(self, values: Values) -> list[wire.ScoreItem]:
        return [self.source.item(values)]

    def columns(self, values: Values, sequences: Sequence[wire.SequenceResult]) -> Values:
        return score_columns(sequences[0], self.with_tokens, self.source.whole_text(values))
