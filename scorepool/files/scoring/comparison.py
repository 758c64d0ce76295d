"""Compare models on each row. A RowScoring of tasks.py.

The columns of each model begin with its name. Those of the second and later ones end with their differences from the
first model, and with `wins`: 1.0 if the model has fewer bits per byte than the first, 0.5 if as many, 0.0 if more.

Bits per byte compare any two models. Means per token do so if both divide the completion into the same tokens, and sums
if both score the same bytes; the difference is null otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scorepool import wire
from scorepool.files.rows import Values
from scorepool.files.scoring.columns import ScoreColumns
from scorepool.files.scoring.completion import CompletionScoring
from scorepool.files.scoring.measures import scored

SUM_DIFFERENCE = "logprob_sum_difference"
PER_TOKEN_DIFFERENCE = "logprob_per_token_difference"  # noqa: S105
PER_BYTE_DIFFERENCE = "bits_per_byte_difference"
WINS = "wins"
DIFFERENCES = (SUM_DIFFERENCE, PER_TOKEN_DIFFERENCE, PER_BYTE_DIFFERENCE, WINS)
_MEANS = ("logprob_per_token", "bits_per_byte")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One item per row, under at least two models."""

    source: ScoreColumns
    models: tuple[str, ...]
    with_tokens: bool
    items_per_row: int = 1

    @property
    def options(self) -> dict[str, Any]:
        return self._scoring.options

    @property
    def text_columns(self) -> tuple[str, ...]:
        return self.source.names

    @property
    def new_columns(self) -> tuple[str, ...]:
        return self._names(self._scoring.new_columns, DIFFERENCES)

    @property
    def averaged(self) -> tuple[str, ...]:
        return self._names(_MEANS, DIFFERENCES)

    @property
    def _scoring(self) -> CompletionScoring:
        return CompletionScoring(self.source, self.with_tokens)

    def _names(self, of_each: Sequence[str], of_later: Sequence[str]) -> tuple[str, ...]:
        names = [f"{model}_{name}" for model in self.models for name in of_each]
        return (*names, *(f"{model}_{name}" for model in self.models[1:] for name in of_later))

    def items(self, values: Values) -> list[wire.ScoreItem]:
        return self._scoring.items(values)

    def columns(self, values: Values, results: Sequence[Sequence[wire.SequenceResult]]) -> Values:
        scores = [self._scoring.columns(values, [result]) for result in results]
        found = {
            f"{model}_{name}": value
            for model, score in zip(self.models, scores, strict=True)
            for name, value in score.items()
        }
        tokens = [[each for _, each in scored(sequences[0])] for sequences in results]
        for model, score, own in zip(self.models[1:], scores[1:], tokens[1:], strict=True):
            found |= {f"{model}_{name}": value for name, value in differences(score, scores[0], own, tokens[0]).items()}
        return found


def differences(score: Values, first: Values, tokens: list[bytes], first_tokens: list[bytes]) -> Values:
    """Return DIFFERENCES between the columns of two models. `tokens` are the bytes of those that have a logprob."""
    bits = _difference(score, first, "bits_per_byte")
    return {
        SUM_DIFFERENCE: (
            _difference(score, first, "logprob_sum") if b"".join(tokens) == b"".join(first_tokens) else None
        ),
        PER_TOKEN_DIFFERENCE: _difference(score, first, "logprob_per_token") if tokens == first_tokens else None,
        PER_BYTE_DIFFERENCE: bits,
        WINS: None if bits is None else 0.5 - 0.5 * ((bits > 0) - (bits < 0)),
    }


def _difference(score: Values, first: Values, name: str) -> float | None:
    return None if score[name] is None or first[name] is None else score[name] - first[name]
