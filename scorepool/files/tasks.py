"""Compute chunks of rows as jobs. A row at fault is found and left out, and the others are computed without it."""

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from scorepool import wire
from scorepool.files.errors import ServerError
from scorepool.files.measures import generate_columns, score_columns
from scorepool.files.rows import Done, DoneRows, Row, Values
from scorepool.sdk import AsyncClient, AsyncJob, JobFailed, ScorepoolError

_REFUSED = frozenset({400, 413, 422})  # HTTP statuses for which a row may be to blame
_NOT_OF_A_ROW = frozenset({"canceled", "expired"})  # codes of failures
_ITEM = re.compile(r"items\[(\d+)\]")
_LAST_WORDS_S = 5.0  # in which a submission that has begun may end after Ctrl-C, so that its job can be canceled


class Task(Protocol):
    """What is done with the rows of a file."""

    async def run(self, rows: list[Row]) -> DoneRows:
        """Return all rows, in order, each with its new columns or a reason. Raises ServerError."""


class RowColumns(Protocol):
    """What takes the values that a job needs out of a row."""

    def item(self, values: Values) -> wire.ScoreItem:
        """Return what is scored. Raises ValueError with a reason."""


class PromptColumn(Protocol):
    """What takes the prompt out of a row."""

    def prompt(self, values: Values) -> dict[str, Any]:
        """Return the prompt or the messages, as arguments of wire.Generate. Raises ValueError with a reason."""


class RowFault(Exception):
    """A job that failed for one of its rows: `index`, or one of all of them."""

    def __init__(self, reason: str, index: int | None) -> None:
        self.reason, self.index = _ITEM.sub("the row", reason, count=1), index
        super().__init__(self.reason)


class ScoreTask:
    """Score rows, many per job. The jobs' Idempotency-Keys follow from `run_id` and the rows, so that a process that
    goes on after another gets the jobs of that one."""

    def __init__(
        self,
        client: AsyncClient,
        make_request: Callable[[list[wire.ScoreItem]], wire.Score],
        columns: RowColumns,
        run_id: str,
        *,
        with_tokens: bool = False,
        prefix: str = "",
    ) -> None:
        self._client, self._make_request, self._columns, self._run_id = client, make_request, columns, run_id
        self._with_tokens, self._prefix = with_tokens, prefix

    async def run(self, rows: list[Row]) -> DoneRows:
        done = DoneRows([])
        items: list[tuple[Row, wire.ScoreItem]] = []
        for row in rows:
            try:
                if row.values is None:
                    raise ValueError(row.reason)
                items.append((row, self._columns.item(row.values)))
            except ValueError as error:
                done.rows.append(Done(row, reason=str(error)))
        await self._score(items, done)
        done.rows.sort(key=lambda each: each.row.number)
        return done

    async def _score(self, items: Sequence[tuple[Row, wire.ScoreItem]], done: DoneRows) -> None:
        """Score items, and divide them as often as one of them is at fault."""
        pending = [items] if items else []
        while pending:
            part = pending.pop()
            try:
                done.rows += await self._score_part(part, done)
            except RowFault as fault:
                if len(part) == 1 or fault.index is not None:
                    index = fault.index or 0
                    done.rows.append(Done(part[index][0], reason=fault.reason))
                    rest = [*part[:index], *part[index + 1 :]]
                    pending += [rest] if rest else []
                else:
                    half = len(part) // 2
                    pending += [part[half:], part[:half]]

    async def _score_part(self, part: Sequence[tuple[Row, wire.ScoreItem]], done: DoneRows) -> list[Done]:
        """Score items in one job. Raises RowFault, ServerError."""
        request = self._make_request([item for _, item in part])
        key = f"{self._run_id}-{part[0][0].number}-{part[-1][0].number}-{len(part)}"
        result = await run_job(self._client, request, key, done)
        done.stamps.append(result.stamp)
        return [
            Done(
                row,
                {self._prefix + name: value for name, value in score_columns(sequence, self._with_tokens).items()},
                num_tokens=sequence.num_prompt_tokens + len(sequence.token_ids) - sequence.num_reported_prompt_tokens,
            )
            for (row, _), sequence in zip(part, result.sequences, strict=True)
        ]


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
            if row.values is None:
                raise ValueError(row.reason)
            request = self._make_request(**self._column.prompt(row.values))
            result = await run_job(self._client, request, f"{self._run_id}-{row.number}", done)
        except (ValueError, RowFault) as error:
            return Done(row, reason=str(error))
        done.stamps.append(result.stamp)
        columns = generate_columns(result.sequences[0], self._with_tokens)
        return Done(
            row,
            {self._prefix + name: value for name, value in columns.items()},
            num_tokens=result.usage.prompt_tokens + result.usage.completion_tokens,
        )


async def run_job(client: AsyncClient, request: wire.Request, key: str, done: DoneRows) -> wire.Result:
    """Run a job and note its id in `done`. Raises RowFault, ServerError.

    A job that an earlier process canceled is deleted and submitted again.
    """
    for _ in range(2):
        try:
            job = await submit(client, request, key)
            with suppress(JobCanceled):
                return await _result_of(job, done)
            await job.delete()
        except ScorepoolError as error:
            raise fault_of(error.message, error.field, error.status in _REFUSED) from error
    raise ServerError(f"{job!r} was canceled by somebody else: the same command goes on")


class JobCanceled(Exception):
    """A job that was canceled before its end."""


async def _result_of(job: AsyncJob, done: DoneRows) -> wire.Result:
    """Return a job's result. Raises JobCanceled, RowFault, ServerError, ScorepoolError."""
    try:
        result = await job.result()
    except JobFailed as error:
        if error.failure.code == "canceled":
            raise JobCanceled from error
        done.job_ids.append(job.id)
        raise fault_of(error.failure.message, error.failure.field, error.failure.code not in _NOT_OF_A_ROW) from error
    done.job_ids.append(job.id)
    return result


def fault_of(message: str, field: str | None, may_be_of_a_row: bool) -> RowFault | ServerError:
    """Return whose fault a refusal or a failure is."""
    item = _ITEM.match(field or "")
    if may_be_of_a_row and item:
        return RowFault(message, int(item[1]))
    if may_be_of_a_row and field in (None, "items", "prompt"):
        return RowFault(message, None)
    return ServerError(f"the server refuses: {message}")


async def submit(client: AsyncClient, request: wire.Request, key: str) -> AsyncJob:
    """Submit a job. If this is canceled meanwhile, wait for its id first: who closes the client cancels it then."""
    submission = asyncio.create_task(client.submit(request, idempotency_key=key))
    try:
        return await asyncio.shield(submission)
    except asyncio.CancelledError:
        with suppress(Exception):
            await asyncio.wait_for(submission, _LAST_WORDS_S)
        raise
