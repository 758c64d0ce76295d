"""Serve /v1/jobs/{id}/events: a job's tokens as they come, then the job."""

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path
from starlette.requests import Request
from starlette.responses import Response

from scorepool.api.dependencies import HeldResultsDep, JobsDep, Owner, StreamingDep, known_query
from scorepool.api.event_cursor import EventCursor
from scorepool.api.http import openapi
from scorepool.api.http.errors import BadRequest
from scorepool.api.http.sse import EventStream
from scorepool.api.job_events import EVENTS, encode_events

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], dependencies=[Depends(known_query)])


@router.get(
    "/{id}/events",
    summary="Stream the events of a job",
    response_class=Response,  # no JSON
    responses=openapi.responses({}, (400, 401, 404, 503), EVENTS),
)
async def events(
    job_id: Annotated[str, Path(alias="id")],
    request: Request,
    owner: Owner,
    jobs: JobsDep,
    streaming: StreamingDep,
    held: HeldResultsDep,
    last_event_id: Annotated[str, Header(description="The `id` of the last event that was received.")] = "",
) -> Response:
    """Send server-sent events until the job has ended.

    `tokens` (a TokenDelta): new tokens of a job that was submitted with `stream`. `progress` (a Progress): how many
    items and tokens of a score or classify job are done, about once a second while it runs. `restart`: all tokens sent
    so far are void, because the worker died and the next one generated others. `end` (the Job): the job has ended.

    If the server's longest wait is over first, the stream ends without `end`: reconnect with `Last-Event-ID`.
    """
    job = await jobs.read_state(owner, job_id)
    try:
        cursor = EventCursor.parse(last_event_id)
    except ValueError as error:
        raise BadRequest(str(error), "Last-Event-ID") from None
    followed = streaming.follow(owner, job, cursor, held)
    return EventStream(request, encode_events(followed, cursor, held), last=b"")
