"""Score documents in windows of a model's context. A RowScoring and a Task of tasks.py.

A document that is longer than the context is cut into windows that begin `stride` tokens after each other. Each token
is scored once, in the first window that holds it, so that of every window but the first the last `stride` tokens are
scored, after at least `context - stride` tokens. The first token of a document is not scored: it is BOS, if the model's
texts begin with it. That is the method of the guide to perplexity in transformers' documentation.
"""

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scorepool import wire
from scorepool.files.formats.documents import check_characters
from scorepool.files.rows import DoneRows, Row, Values
from scorepool.files.scoring.columns import text_of
from scorepool.files.scoring.jobs import RowFault, run_job
from scorepool.files.scoring.measures import BITS_PER_NAT, exp, scored
from scorepool.files.scoring.tasks import ScoreTask
from scorepool.sdk import AsyncClient

DOCUMENT_COLUMNS = (
    "num_tokens",
    "num_bytes",
    "num_windows",
    "logprob_sum",
    "perplexity",
    "bits_per_token",
    "bits_per_byte",
)
_TOKEN_IDS = "token_ids"  # noqa: S105
_TEXT = "text"  # None: the first token that is scored does not begin it


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens from `begin` to `end`, of which those from `scored_from` are scored."""

    begin: int
    scored_from: int
    end: int


def cut_windows(num_tokens: int, context: int, stride: int) -> Iterator[Window]:
    """Yield windows of at most `context` tokens, `stride` being from 1 to `context` - 1."""
    scored_from = 1
    for begin in range(0, num_tokens, stride):
        end = min(begin + context, num_tokens)
        if scored_from < end:
            yield Window(begin, scored_from, end)
        if end == num_tokens:
            return
        scored_from = end


@dataclass(frozen=True, slots=True)
class WindowScoring:
    """One item per window of a row of token ids."""

    context: int
    stride: int
    averaged: tuple[str, ...] = ("logprob_sum", "num_tokens", "num_bytes")
    items_per_row: int = 1
    text_columns: tuple[str, ...] = ()  # of a row of token ids

    @property
    def options(self) -> dict[str, Any]:
        return {"--context": self.context, "--stride": self.stride}

    @property
    def new_columns(self) -> tuple[str, ...]:
        return DOCUMENT_COLUMNS

    def tokens_read(self, num_tokens: int) -> int:
        """Return the tokens of all windows of a document."""
        return sum(each.end - each.begin for each in cut_windows(num_tokens, self.context, self.stride))

    def items(self, values: Values) -> list[wire.ScoreItem]:
        token_ids = values[_TOKEN_IDS]
        windows = cut_windows(len(token_ids), self.context, self.stride)
        return [
            wire.ScoreItem(
                prompt=token_ids[each.begin : each.scored_from], completion=token_ids[each.scored_from : each.end]
            )
            for each in windows
        ]

    def columns(self, values: Values, sequences: Sequence[wire.SequenceResult]) -> Values:
        pairs = [
            pair
            for index, sequence in enumerate(sequences)
            for pair in scored(sequence, None if index else values[_TEXT])
        ]
        if not pairs:
            raise ValueError("the document has no token after its first, which has no logprob")
        logprob_sum = math.fsum(logprob for logprob, _ in pairs)
        return document_columns(logprob_sum, len(pairs), sum(len(each) for _, each in pairs)) | {
            "num_windows": len(sequences)
        }


def document_columns(logprob_sum: float, num_tokens: int, num_bytes: int) -> Values:
    """Return DOCUMENT_COLUMNS of scored tokens and their bytes, but for the windows. At least one token."""
    bits = -logprob_sum * BITS_PER_NAT
    return {
        "num_tokens": num_tokens,
        "num_bytes": num_bytes,
        "num_windows": None,
        "logprob_sum": logprob_sum,
        "perplexity": exp(-logprob_sum / num_tokens),
        "bits_per_token": bits / num_tokens,
        "bits_per_byte": bits / num_bytes if num_bytes else None,
    }


def document_of(values: Values, column: str) -> str:
    """Return the text of a document. Raises ValueError with a reason."""
    text = text_of(values, column)
    check_characters(text)
    return text


class DocumentTask:
    """Tokenize the texts of rows, and score the tokens. `dropped` columns do not go to the output."""

    def __init__(
        self,
        client: AsyncClient,
        model: str,
        run_id: str,
        *,
        column: str,
        dropped: tuple[str, ...],
        priority: wire.Priority,
        task: ScoreTask,
    ) -> None:
        self._client, self._model, self._run_id = client, model, run_id
        self._column, self._dropped, self._priority, self._task = column, dropped, priority, task

    async def run(self, rows: list[Row]) -> DoneRows:
        done = DoneRows([])
        tokenized = list(await asyncio.gather(*(self._tokenize(row, done) for row in rows)))
        scored_rows = await self._task.run(tokenized)
        return DoneRows(
            [replace(each, row=self._drop(row)) for row, each in zip(rows, scored_rows.rows, strict=True)],
            done.job_ids + scored_rows.job_ids,
            done.stamps + scored_rows.stamps,
        )

    async def _tokenize(self, row: Row, done: DoneRows) -> Row:
        """Return the row with its token ids alone, or the reason why it has none."""
        try:
            text = document_of(row.readable_values(), self._column)
            request = wire.Tokenize(model=self._model, prompt=text, priority=self._priority, wait_for_model=True)
            result = await run_job(self._client, request, f"{self._run_id}-tokens-{row.number}", done)
        except (ValueError, RowFault) as error:
            return replace(row, values=None, reason=str(error))
        sequence = result.sequences[0]
        return replace(row, values={_TOKEN_IDS: sequence.token_ids, _TEXT: text if sequence.bos_added else None})

    def _drop(self, row: Row) -> Row:
        if row.values is None:
            return row
        return replace(row, values={name: each for name, each in row.values.items() if name not in self._dropped})
