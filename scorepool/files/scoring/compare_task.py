"""Score rows under several models: by compare jobs where a model has the tokens of the first one, else each alone.

A compare job scores the tokens of a row under both, and says how far the distributions are apart at each of them.
Models of different vocabularies divide text differently: each scores its own tokens, and bits per byte are compared.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from scorepool import wire
from scorepool.files.rows import Done, DoneRows, Row, TokenComparison
from scorepool.files.scoring.comparison import Comparison, ModelItem
from scorepool.files.scoring.scorer import Scorer
from scorepool.files.scoring.tasks import num_tokens_of, score_rows


class CompareTask:
    """Score rows under the first model and the others."""

    def __init__(self, scorers: Sequence[Scorer[ModelItem]], comparison: Comparison) -> None:
        self._scorers, self._comparison = scorers, comparison

    async def run(self, rows: list[Row]) -> DoneRows:
        done = DoneRows([])
        scored_rows, reasons = await score_rows(rows, self._comparison.items, self._scorers, done)
        for row in rows:
            if row.number in reasons:
                done.rows.append(Done(row, reason=reasons[row.number]))
                continue
            found = zip(self._scorers, scored_rows, strict=True)
            done.rows.append(self._done(row, {scorer.model: each.sequences[row.number][0] for scorer, each in found}))
        return done

    def _done(self, row: Row, items: dict[str, ModelItem]) -> Done:
        first = self._comparison.models[0]
        for item in list(items.values()):
            if item.base is not None:
                items.setdefault(first, ModelItem(item.base))
        columns = self._comparison.columns(row.readable_values(), items)
        return Done(
            row,
            columns,
            num_tokens=sum(num_tokens_of(item.own) for item in items.values()),
            averaged={name: columns[name] for name in self._comparison.averaged if columns[name] is not None},
            divergences={model: tokens for model, item in items.items() if (tokens := compared_tokens(item))},
        )


def read_score(result: wire.Result) -> list[ModelItem]:
    """Return what a score job found of its items."""
    return [ModelItem(sequence) for sequence in result.sequences]


def read_compared(result: wire.Result) -> list[ModelItem]:
    """Return what a compare job found of its items."""
    assert result.comparison is not None
    return [
        ModelItem(
            own,
            replace(own, logprobs=compared.base_logprobs, ranks=compared.base_ranks, logprob_sum=None, is_greedy=None),
            compared,
        )
        for own, compared in zip(result.sequences, result.comparison.sequences, strict=True)
    ]


def compared_tokens(item: ModelItem) -> list[TokenComparison]:
    """Return the tokens of an item at which two distributions were compared."""
    if item.compared is None or item.base is None:
        return []
    columns = zip(
        item.compared.kld_lower,
        item.compared.kld_upper,
        item.compared.same_top,
        item.own.logprobs or (),
        item.base.logprobs or (),
        strict=True,
    )
    return [
        TokenComparison(lower, upper, bool(same), logprob, base_logprob)
        for lower, upper, same, logprob, base_logprob in columns
        if same is not None
    ]
