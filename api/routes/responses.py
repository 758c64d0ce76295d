"""Serve the responses that are kept: read one, cancel one, delete one. api/routes/dialects.py makes them."""

import contextlib
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import HeldResultsDep, JobsDep, Owner, QueueDep, known_query
from scorepool.api.dialects.openai.responses import ResponseRequest
from scorepool.api.dialects.openai.responses_kept import DeletedResponse, job_id_of, to_kept_response
from scorepool.api.dialects.openai.responses_reply import ResponseObject
from scorepool.api.http import openapi
from scorepool.api.http.errors import BadRequest, Conflict, NotFound
from scorepool.api.http.formats import reply
from scorepool.api.http.large_replies import HeldResults
from scorepool.api.repositories import decode
from scorepool.api.repositories.jobs import ENDED, Jobs

ResponseId = Annotated[str, Path(alias="id")]
router = APIRouter(prefix="/v1/responses", tags=["openai"], dependencies=[Depends(known_query)])


def _responses(reply_type: Any, *errors: int) -> dict[int | str, dict[str, Any]]:
    return openapi.responses({200: reply_type}, (400, 401, 404, *errors, 503))


@router.get("/{id}", summary="Read a response", responses=_responses(ResponseObject, 429))
async def read_response(response_id: ResponseId, owner: Owner, jobs: JobsDep, held: HeldResultsDep) -> Response:
    """Read a response that is kept. `status` is queued or in_progress until it has ended."""
    job, kept = await _read(jobs, owner, response_id, held)
    return await held.reply(lambda: to_kept_response(kept, job), "json")


@router.post("/{id}/cancel", summary="Cancel a response", responses=_responses(ResponseObject, 429))
async def cancel_response(
    response_id: ResponseId, owner: Owner, jobs: JobsDep, queue: QueueDep, held: HeldResultsDep
) -> Response:
    """Cancel a response that runs in the background. One that has ended stays as it is."""
    job, kept = await _read(jobs, owner, response_id, held)
    if not kept.background:
        raise BadRequest("id: expected a response that was made with `background`: true", "id")
    if job.status not in ENDED:
        with contextlib.suppress(Conflict):  # it ended just now
            await queue.cancel(owner, job.id)
        job, kept = await _read(jobs, owner, response_id, held)
    return await held.reply(lambda: to_kept_response(kept, job), "json")


@router.delete("/{id}", summary="Delete a response", responses=_responses(DeletedResponse, 409, 429))
async def delete_response(
    response_id: ResponseId, owner: Owner, jobs: JobsDep, queue: QueueDep, held: HeldResultsDep
) -> Response:
    """Delete a response that has ended."""
    job, _ = await _read(jobs, owner, response_id, held)
    try:
        await queue.delete(owner, job.id)
    except Conflict:
        message = f"id: the response is {job.status}, only one that has ended can be deleted; cancel it first"
        raise Conflict(message, "id") from None
    return reply(DeletedResponse(id=response_id), "json")


def _absent(response_id: str) -> NotFound:
    """Build the same error for a response that never existed, one that expired and one of another owner."""
    return NotFound(f"no response {wire.quote(response_id)}; they are kept for a limited time after their end", "id")


async def _read(jobs: Jobs, owner: str, response_id: str, held: HeldResults) -> tuple[wire.Job, ResponseRequest]:
    """Return the job of a response and what was kept. Raises NotFound, TooManyResults."""
    try:
        job = await jobs.read(owner, job_id_of(response_id), held)
    except NotFound:
        raise _absent(response_id) from None
    kept = decode.message(await jobs.read_kept_body(job.id), ResponseRequest)
    if kept is None:
        raise _absent(response_id)
    return job, kept
