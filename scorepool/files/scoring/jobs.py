"""Run the jobs of rows, and say whose fault it is if one fails."""

import asyncio
import re
from contextlib import suppress

from msgspec.structs import replace

from scorepool import wire
from scorepool.files.errors import BadInput, FileError, ServerError
from scorepool.files.rows import DoneRows
from scorepool.sdk import AsyncClient, AsyncJobHandle, JobFailed, ScorepoolError
from scorepool.sdk.async_jobs import ENDED, LONG_POLL_S
from scorepool.sdk.splitting import result_of
from scorepool.wire.submission import MAX_TIMEOUT_S

_REFUSED = frozenset({400, 413, 422})  # HTTP statuses for which a row may be to blame
_NOT_OF_A_ROW = frozenset({"canceled", "expired"})  # codes of failures
_ITEM = re.compile(r"items\[(\d+)\]")
_LAST_WORDS_S = 5.0  # in which a submission that has begun may end after Ctrl-C, so that its job can be canceled


class RowFault(Exception):
    """A job that failed for one of its rows: `index`, or one of all of them."""

    def __init__(self, reason: str, index: int | None) -> None:
        self.reason, self.index = _ITEM.sub("the row", reason, count=1), index
        super().__init__(self.reason)


async def run_job(client: AsyncClient, request: wire.Request, key: str, done: DoneRows) -> wire.Result:
    """Run a job, and note its id and its stamp in `done`. Raises RowFault, BadInput, ServerError.

    A job that an earlier process canceled is deleted and submitted again. A job may take a day, as nobody waits for a
    single one: a row that is slow is no row at fault.
    """
    request = replace(request, timeout_s=MAX_TIMEOUT_S)
    for _ in range(2):
        try:
            job = await submit(client, request, key)
            with suppress(JobCanceled):
                return await _result_of(client, job, request, done)
            await job.delete()
        except ScorepoolError as error:
            raise fault_of(error.message, error.field, error.status in _REFUSED) from error
    raise ServerError(f"{job!r} was canceled by somebody else: the same command goes on")


class JobCanceled(Exception):
    """A job that was canceled before its end."""


async def _result_of(client: AsyncClient, job: AsyncJobHandle, request: wire.Request, done: DoneRows) -> wire.Result:
    """Return a job's result, however long it takes. A server may be away as long as the client repeats calls.

    Raises JobCanceled, RowFault, ServerError, ScorepoolError, Unreachable.
    """
    while (found := await client.job(job, wait_s=LONG_POLL_S)).status not in ENDED:
        pass
    try:
        result = result_of(found, client.url)
    except JobFailed as error:
        if error.failure.code == "canceled":
            raise JobCanceled from error
        done.job_ids += _ids_of(job, request)
        raise fault_of(error.failure.message, error.failure.field, error.failure.code not in _NOT_OF_A_ROW) from error
    done.job_ids += _ids_of(job, request)
    done.stamps.append((request.model, result.stamp))
    if isinstance(request, wire.Compare) and result.comparison:
        done.stamps.append((request.base, result.comparison.base))
    return result


def _ids_of(job: AsyncJobHandle, request: wire.Request) -> list[str]:
    """Return the ids of a job, and of its base's."""
    return [job.id, wire.base_job_id(job.id)] if isinstance(request, wire.Compare) else [job.id]


def fault_of(message: str, field: str | None, may_be_of_a_row: bool) -> RowFault | FileError:
    """Return whose fault a refusal or a failure is."""
    item = _ITEM.match(field or "")
    if may_be_of_a_row and item:
        return RowFault(message, int(item[1]))
    if may_be_of_a_row and (field or "prompt").partition("[")[0] in ("items", "prompt", "messages"):
        return RowFault(message, None)
    if may_be_of_a_row:  # an option, which every row has
        return BadInput(f"the server refuses an option: {message}")
    return ServerError(f"the server refuses: {message}")


async def submit(client: AsyncClient, request: wire.Request, key: str) -> AsyncJobHandle:
    """Submit a job, or take over that of an earlier process. Who closes the client cancels it.

    If this is canceled meanwhile, wait for the job's id first.
    """

    async def submit_and_attach() -> AsyncJobHandle:
        job = await client.submit(request, idempotency_key=key)
        client.attach(job)
        return job

    submission = asyncio.create_task(submit_and_attach())
    try:
        return await asyncio.shield(submission)
    except asyncio.CancelledError:
        with suppress(Exception):
            await asyncio.wait_for(submission, _LAST_WORDS_S)
        raise
