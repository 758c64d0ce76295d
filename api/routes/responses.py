"""Serve the responses that are kept: read, stream, list what they were asked, cancel and delete them.

api/routes/dialects.py makes them.
"""

import contextlib
from collections.abc import Awaitable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import (
    HeldResultsDep,
    JobsDep,
    Owner,
    QueueDep,
    StreamingDep,
    SubmissionDep,
    known_query,
)
from scorepool.api.dialects.openai.endpoints import RESPONSES
from scorepool.api.dialects.openai.response_items import ItemList, Order, to_item_list
from scorepool.api.dialects.openai.response_object import ResponseEvent, ResponseObject
from scorepool.api.dialects.openai.responses import LOGPROBS, Included, ResponseRequest
from scorepool.api.dialects.openai.responses_kept import (
    DeletedResponse,
    KeptResponseEvents,
    job_id_of,
    to_kept_response,
)
from scorepool.api.event_cursor import EventCursor
from scorepool.api.http import openapi
from scorepool.api.http.errors import BadRequest, Conflict, NotFound
from scorepool.api.http.formats import reply
from scorepool.api.http.large_replies import HeldResults
from scorepool.api.http.sse import EventStream
from scorepool.api.kept_events import kept_events
from scorepool.api.repositories import decode
from scorepool.api.repositories.jobs import ENDED, Jobs

MAX_EVENTS = 10_000_000  # more than a response has
CANCEL_WAIT_S = 5.0  # a worker looks at its cancellations many times in it

ResponseId = Annotated[str, Path(alias="id")]
router = APIRouter(prefix="/v1/responses", tags=["openai"], dependencies=[Depends(known_query)])


def _responses(reply_type: Any, *errors: int) -> dict[int | str, dict[str, Any]]:
    return openapi.responses({200: reply_type}, (400, 401, 404, *errors, 503))


@router.get(
    "/{id}",
    summary="Read a response",
    responses=openapi.responses(
        {200: ResponseObject}, (400, 401, 404, 429, 503), [("message", ResponseEvent), ("message", wire.ErrorReply)]
    ),
)
async def read_response(
    response_id: ResponseId,
    request: Request,
    owner: Owner,
    jobs: JobsDep,
    streaming: StreamingDep,
    held: HeldResultsDep,
    include: Annotated[
        list[Included] | None, Query(alias="include[]", description="Has no effect: what was asked for is there.")
    ] = None,
    stream: Annotated[bool, Query(description="Stream the events of a response that was made to be streamed.")] = False,
    starting_after: Annotated[
        int | None, Query(ge=0, le=MAX_EVENTS, description="Leave out the events up to this `sequence_number`.")
    ] = None,
) -> Response:
    """Read a response that is kept. `status` is queued or in_progress until it has ended.

    One that was made with `background` and `stream` can be streamed, from its beginning or from where a stream broke
    off, as often as it is kept. If the server's longest wait is over first, the stream ends without the last event.
    """
    job_id = job_id_of(response_id)
    if stream:
        job, kept = await _read(jobs.read_state(owner, job_id), jobs, response_id, held)
        if not (kept.background and kept.stream):
            raise BadRequest("stream: expected a response that was made with `background` and `stream`: true", "stream")
        writer = KeptResponseEvents(kept, job, -1 if starting_after is None else starting_after)
        followed = streaming.follow(owner, job, EventCursor.parse(""), held)
        to_error_event = partial(RESPONSES.to_error_event, writer)
        return EventStream(request, kept_events(followed, writer, held), b"", to_error_event)
    if starting_after is not None:
        raise BadRequest("starting_after: expected `stream`: true beside it", "starting_after")
    job, kept = await _read(jobs.read(owner, job_id, held), jobs, response_id, held)
    if LOGPROBS in (include or ()) and not kept.has_token_logprobs:
        raise BadRequest("include[]: expected a response that was made with logprobs", "include[]")
    return await held.reply(lambda: to_kept_response(kept, job), "json")


@router.get("/{id}/input_items", summary="List what a response was asked", responses=_responses(ItemList, 429))
async def list_input_items(
    response_id: ResponseId,
    owner: Owner,
    jobs: JobsDep,
    held: HeldResultsDep,
    after: Annotated[str | None, Query(max_length=128, description="The id of the item before the first.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Order, Query()] = "desc",
    include: Annotated[
        list[Literal["message.input_image.image_url", "reasoning.encrypted_content"]] | None,
        Query(alias="include[]", description="Has no effect: images and reasoning are shown."),
    ] = None,
) -> Response:
    """List the items of the conversation up to the answer, also those that `previous_response_id` continued."""
    job, kept = await _read(jobs.read_state(owner, job_id_of(response_id)), jobs, response_id, held)
    try:
        return await held.reply(lambda: to_item_list(kept, job.id, after, limit, order), "json")
    except wire.Invalid as error:
        raise BadRequest(error.message, error.field) from None


@router.post("/{id}/cancel", summary="Cancel a response", responses=_responses(ResponseObject, 429))
async def cancel_response(
    response_id: ResponseId,
    request: Request,
    owner: Owner,
    jobs: JobsDep,
    queue: QueueDep,
    submission: SubmissionDep,
    held: HeldResultsDep,
) -> Response:
    """Cancel a response that runs in the background, and wait a moment for its end.

    One that has ended stays as it is.
    """
    job, kept = await _read(jobs.read(owner, job_id_of(response_id), held), jobs, response_id, held)
    if not kept.background:
        raise BadRequest("id: expected a response that was made with `background`: true", "id")
    if job.status not in ENDED:
        with contextlib.suppress(Conflict):  # it ended just now
            await queue.cancel(owner, job.id)
        try:
            job = await submission.wait_for_job(request, owner, job.id, held, CANCEL_WAIT_S)
        except NotFound:
            raise _absent(response_id) from None
    return await held.reply(lambda: to_kept_response(kept, job), "json")


@router.delete("/{id}", summary="Delete a response", responses=_responses(DeletedResponse, 409, 429))
async def delete_response(
    response_id: ResponseId, owner: Owner, jobs: JobsDep, queue: QueueDep, held: HeldResultsDep
) -> Response:
    """Delete a response that has ended."""
    job, _ = await _read(jobs.read_state(owner, job_id_of(response_id)), jobs, response_id, held)
    try:
        await queue.delete(owner, job.id)
    except NotFound:  # another request deleted it just now
        raise _absent(response_id) from None
    except Conflict:
        message = f"id: the response is {job.status}, only one that has ended can be deleted; cancel it first"
        raise Conflict(message, "id") from None
    return reply(DeletedResponse(id=response_id), "json")


def _absent(response_id: str) -> NotFound:
    """Build the same error for a response that never existed, one that expired and one of another owner."""
    return NotFound(f"no response {wire.quote(response_id)}; they are kept for a limited time after their end", "id")


async def _read(
    read: Awaitable[wire.Job], jobs: Jobs, response_id: str, held: HeldResults
) -> tuple[wire.Job, ResponseRequest]:
    """Return the job of a response and what was kept. Raises NotFound, TooManyResults."""
    try:
        job = await read
    except NotFound:
        raise _absent(response_id) from None
    body = await jobs.read_kept_body(job.id, held)
    kept = await held.run(lambda: decode.message(body, ResponseRequest))
    if kept is None:
        raise _absent(response_id)
    return job, kept
