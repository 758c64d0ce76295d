"""Serve /v1/jobs/{id}/events: a job's tokens as they come, then the job."""

from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import HeldResultsDep, JobsDep, Owner, StreamingDep, known_query
from scorepool.api.event_cursor import CursorEvent, EventCursor
from scorepool.api.http import openapi
from scorepool.api.http.errors import BadRequest
from scorepool.api.http.large_replies import HeldResults
from scorepool.api.http.sse import EventStream
from scorepool.api.repositories.jobs import ENDED


class Restart(Struct, frozen=True, forbid_unknown_fields=True):
    """Make all tokens sent so far void."""


EVENTS = [("tokens", wire.TokenDelta), ("restart", Restart), ("end", wire.Job)]
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

    `tokens` (a TokenDelta): new tokens of a job that was submitted with `stream`. `restart`: all tokens sent so far are
    void, because the worker died and the next one generated others. `end` (the Job): the job has ended.

    If the server's longest wait is over first, the stream ends without `end`: reconnect with `Last-Event-ID`.
    """
    job = await jobs.read_state(owner, job_id)
    try:
        cursor = EventCursor.parse(last_event_id)
    except ValueError as error:
        raise BadRequest(str(error), "Last-Event-ID") from None
    followed = streaming.follow(owner, job, cursor, held)
    return EventStream(request, encode_events(followed, cursor, held), last=b"")


async def encode_events(
    events: AsyncGenerator[CursorEvent | wire.Job | None], cursor: EventCursor, held: HeldResults
) -> AsyncGenerator[bytes | None]:
    """Write each event with its name and its id."""
    try:
        async for event in events:
            if event is None:
                yield None
            elif isinstance(event, CursorEvent):
                yield await held.run(partial(_cursor_event, event))  # the last may have a result's tokens
            elif event.status in ENDED:
                end = await held.run(partial(_end_event, event, str(cursor)))
                held.count_reply(len(end))
                yield end
    finally:
        await events.aclose()


def _end_event(job: wire.Job, event_id: str) -> bytes:
    return _event("end", event_id, wire.encode_json(job))


def _cursor_event(event: CursorEvent) -> bytes:
    if isinstance(event.delta, wire.TokenDelta):
        return _event("tokens", event.event_cursor, wire.encode_json(event.delta))
    return _event("restart", event.event_cursor, wire.encode_json(Restart()))


def _event(name: str, event_id: str, data: bytes) -> bytes:
    return f"event: {name}\nid: {event_id}\ndata: ".encode() + data + b"\n\n"
