"""The columns of models that are compared on each row. compare_task.py computes them.

The columns of each model begin with its name. Those of the second and later ones end with their differences from the
first model, and with `wins`: 1.0 if the model has fewer bits per byte than the first, 0.5 if as many, 0.0 if more.

Bits per byte compare any two models. Means per token do so if both divide the completion into the same tokens, and sums
if both score the same bytes; divergences of distributions if both have one vocabulary. They are null otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from scorepool import wire
from scorepool.files.rows import Values
from scorepool.files.scoring.columns import ScoreColumns
from scorepool.files.scoring.completion import CompletionScoring
from scorepool.files.scoring.measures import score_columns, scored

SUM_DIFFERENCE = "logprob_sum_difference"
PER_TOKEN_DIFFERENCE = "logprob_per_token_difference"  # noqa: S105
PER_BYTE_DIFFERENCE = "bits_per_byte_difference"
WINS = "wins"
DIFFERENCES = (SUM_DIFFERENCE, PER_TOKEN_DIFFERENCE, PER_BYTE_DIFFERENCE, WINS)
KLD_LOWER, KLD_UPPER, SAME_TOP_P = "mean_kld_lower", "mean_kld_upper", "same_top_p"
DIVERGENCES = (KLD_LOWER, KLD_UPPER, SAME_TOP_P)
TOKEN_KLD_LOWER, TOKEN_KLD_UPPER = "klds_lower", "klds_upper"
_MEANS = ("logprob_per_token", "bits_per_byte")


@dataclass(frozen=True, slots=True)
class ModelItem:
    """What was found of an item under a model, and by a compare job also under the first one."""

    own: wire.SequenceResult
    base: wire.SequenceResult | None = None
    compared: wire.ComparedSequence | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One item per row, under at least two models."""

    source: ScoreColumns
    models: tuple[str, ...]
    with_tokens: bool

    @property
    def options(self) -> dict[str, Any]:
        return self._scoring.options

    @property
    def text_columns(self) -> tuple[str, ...]:
        return self.source.names

    @property
    def new_columns(self) -> tuple[str, ...]:
        of_tokens = (TOKEN_KLD_LOWER, TOKEN_KLD_UPPER) if self.with_tokens else ()
        return self._names(self._scoring.new_columns, (*DIFFERENCES, *DIVERGENCES, *of_tokens))

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

    def columns(self, values: Values, items: Mapping[str, ModelItem]) -> Values:
        """Return the new columns of a row, of what was found under each model."""
        text = self.source.whole_text(values)
        scores = {model: score_columns(items[model].own, self.with_tokens, text) for model in self.models}
        found = {f"{model}_{name}": value for model, score in scores.items() for name, value in score.items()}
        tokens = {model: [each for _, each in scored(items[model].own, text)] for model in self.models}
        first = self.models[0]
        for model in self.models[1:]:
            own = differences(scores[model], scores[first], tokens[model], tokens[first])
            own |= divergences(items[model].compared, self.with_tokens)
            found |= {f"{model}_{name}": value for name, value in own.items()}
        return found


def divergences(compared: wire.ComparedSequence | None, with_tokens: bool) -> Values:
    """Return DIVERGENCES of a row, and those of its tokens if they are asked for."""
    lower, upper, same = (
        ([], [], []) if compared is None else (compared.kld_lower, compared.kld_upper, compared.same_top)
    )
    known = [index for index, value in enumerate(same) if value is not None]
    found: Values = {
        KLD_LOWER: fsum(lower[index] for index in known) / len(known) if known else None,
        KLD_UPPER: fsum(upper[index] for index in known) / len(known) if known else None,
        SAME_TOP_P: sum(bool(same[index]) for index in known) / len(known) if known else None,
    }
    if with_tokens:
        for name, column in ((TOKEN_KLD_LOWER, lower), (TOKEN_KLD_UPPER, upper)):
            found[name] = [None if value is None else column[index] for index, value in enumerate(same)]
            if compared is None:
                found[name] = None
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
