"""Compute chunks of rows as jobs.

To add something that is scored of a row: a RowScoring in a module of its own.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from scorepool import wire
from scorepool.files.rows import Done, DoneRows, Row, Values
from scorepool.files.scoring.jobs import RowFault, run_job
from scorepool.files.scoring.measures import generate_columns
from scorepool.files.scoring.scorer import ScoredRows, Scorer
from scorepool.sdk import AsyncClient

T = TypeVar("T")


class Task(Protocol):
    """What is done with the rows of a file."""

    async def run(self, rows: list[Row]) -> DoneRows:
        """Return all rows, in order, each with its new columns or a reason. Raises ServerError."""


class RowScoring(Protocol):
    """What is scored of a row, and the columns that follow."""

    @property
    def options(self) -> dict[str, Any]:
        """The command's options that it follows from."""

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Names of the input's columns that hold texts or lists."""

    @property
    def new_columns(self) -> tuple[str, ...]:
        """Names of the columns that every row gets."""

    @property
    def averaged(self) -> tuple[str, ...]:
        """Those of them whose means the summary has."""

    @property
    def items_per_row(self) -> int:
        """About how many items a row has."""

    def items(self, values: Values) -> list[wire.ScoreItem]:
        """Return what is scored. Raises ValueError with a reason."""

    def columns(self, values: Values, sequences: Sequence[wire.SequenceResult]) -> Values:
        """Return the new columns, of a sequence for each item. Raises ValueError with a reason."""


class PromptColumn(Protocol):
    """What takes the prompt out of a row."""

    def prompt(self, values: Values) -> dict[str, Any]:
        """Return the prompt or the messages, as arguments of wire.Generate. Raises ValueError with a reason."""


async def score_rows(
    rows: list[Row], items_of: Callable[[Values], list[wire.ScoreItem]], scorers: Sequence[Scorer[T]], done: DoneRows
) -> tuple[list[ScoredRows[T]], dict[int, str]]:
    """Score rows; return what each scorer found, and the reasons of rows without a result. Raises ServerError."""
    items: dict[int, list[wire.ScoreItem]] = {}
    reasons: dict[int, str] = {}
    for row in rows:
        try:
            items[row.number] = items_of(row.readable_values())
        except ValueError as error:
            reasons[row.number] = str(error)
    scored = await asyncio.gather(*(scorer.score(items, done) for scorer in scorers))
    for scorer, each in reversed(list(zip(scorers, scored, strict=True))):
        owner = f"{scorer.model}: " if scorer.is_named else ""
        reasons |= {number: owner + reason for number, reason in each.reasons.items()}
    return scored, reasons


def num_tokens_of(sequence: wire.SequenceResult) -> int:
    """Return how many tokens the model has read."""
    return sequence.num_prompt_tokens + len(sequence.token_ids) - sequence.num_reported_prompt_tokens


class ScoreTask:
    """Score rows under one model."""

    def __init__(self, scorer: Scorer[wire.SequenceResult], scoring: RowScoring, *, prefix: str = "") -> None:
        self._scorer, self._scoring, self._prefix = scorer, scoring, prefix

    async def run(self, rows: list[Row]) -> DoneRows:
        done = DoneRows([])
        [scored], reasons = await score_rows(rows, self._scoring.items, [self._scorer], done)
        for row in rows:
            reason = reasons.get(row.number)
            done.rows.append(
                self._done(row, scored.sequences[row.number]) if reason is None else Done(row, reason=reason)
            )
        return done

    def _done(self, row: Row, sequences: Sequence[wire.SequenceResult]) -> Done:
        try:
            columns = self._scoring.columns(row.readable_values(), sequences)
        except ValueError as error:
            return Done(row, reason=str(error))
        return Done(
            row,
            {self._prefix + name: value for name, value in columns.items()},
            num_tokens=sum(map(num_tokens_of, sequences)),
            averaged={name: columns[name] for name in self._scoring.averaged if columns[name] is not None},
        )


class GenerateTask:
    """Continue the prompts of rows, one job per row."""

    def __init__(
        self,
        client: AsyncClient,
        make_request: Callable[..., wire.Generate],
        column: PromptColumn,
        run_id: str,
        *,
        with_tokens: bool = False,
        prefix: str = "",
    ) -> None:
        self._client, self._make_request, self._column, self._run_id = client, make_request, column, run_id
        self._with_tokens, self._prefix = with_tokens, prefix

    async def run(self, rows: list[Row]) -> DoneRows:
        done = DoneRows([])
        done.rows = list(await asyncio.gather(*(self._generate(row, done) for row in rows)))
        return done

    async def _generate(self, row: Row, done: DoneRows) -> Done:
        try:
            request = self._make_request(**self._column.prompt(row.readable_values()))
            result = await run_job(self._client, request, f"{self._run_id}-{row.number}", done)
        except (ValueError, RowFault) as error:
            return Done(row, reason=str(error))
        columns = generate_columns(result.sequences[0], self._with_tokens)
        return Done(
            row,
            {self._prefix + name: value for name, value in columns.items()},
            num_tokens=result.usage.prompt_tokens + result.usage.completion_tokens,
        )
