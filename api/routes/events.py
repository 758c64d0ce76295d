"""/v1/jobs/{id}/events: a job's tokens as they come, then the job."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Depends, Header
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import Owner, Parts, known_query
from scorepool.api.dialects.event_cursor import EventCursor, Told
from scorepool.api.http import openapi, tasks
from scorepool.api.http.errors import BadRequest
from scorepool.api.http.sse import KEEP_ALIVE_S, EventStream
from scorepool.api.repositories.jobs import ENDED
from scorepool.api.state import State
from scorepool.api.submission import until_ended


class Restart(Struct, frozen=True, forbid_unknown_fields=True):
    """What was told is void."""


EVENTS = [("tokens", wire.TokenDelta), ("restart", Restart), ("end", wire.Job)]
router = APIRouter(prefix="/v1/jobs", tags=["jobs"], dependencies=[Depends(known_query)])


@router.get(
    "/{id}/events",
    summary="Follow a job",
    response_class=Response,  # no JSON
    responses=openapi.answers({}, (400, 401, 404, 503), EVENTS),
)
async def events(
    id: str,  # noqa: A002
    request: Request,
    owner: Owner,
    parts: Parts,
    last_event_id: Annotated[str, Header(description="The `id` of the last event that came.")] = "",
) -> Response:
    """Server-sent events: `tokens` (a Growth) while a job that was submitted with `stream` runs, `restart` if what was
    told is void, because the worker died and the next took another way, and `end` (the Job) when it has ended.

    Without `end` the stream ends after the server's longest wait: come back with `Last-Event-ID`.
    """
    try:
        progress = EventCursor.parse(last_event_id)
    except ValueError as error:
        raise BadRequest(str(error), "Last-Event-ID") from None
    job = await parts.records.read(owner, id)
    return EventStream(request, follow(parts, owner, job, progress), last=b"")


async def follow(parts: State, owner: str, job: wire.Job, progress: EventCursor) -> AsyncGenerator[bytes | None]:
    """First what the stream of tokens still holds of the job, then what comes."""
    growths: asyncio.Queue[wire.TokenDelta | None] = asyncio.Queue()
    with parts.waiting.listening([job.id], growths.put_nowait):
        ended = asyncio.create_task(until_ended(parts, owner, job.id, parts.settings.max_wait_s))
        ended.add_done_callback(lambda _: growths.put_nowait(None))
        try:
            if job.status not in ENDED:
                for growth in await parts.waiting.past(job.id, job.created_at or 0.0):
                    for told in progress.grow(growth):
                        yield _event(told)
            while True:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        growth_or_end = await growths.get()
                except TimeoutError:
                    yield None
                    continue
                if growth_or_end is None:
                    break
                for told in progress.grow(growth_or_end):
                    yield _event(told)
            job = await ended
            if isinstance(job.result, wire.Result) and job.kind == "generate":
                for told in progress.end(job.id, job.result):
                    yield _event(told)
            if job.status in ENDED:
                yield _written("end", progress.place, wire.encode_json(job))
        finally:
            await tasks.end([ended])


def _event(told: Told) -> bytes:
    if isinstance(told.growth, wire.TokenDelta):
        return _written("tokens", told.place, wire.encode_json(told.growth))
    return _written("restart", told.place, wire.encode_json(Restart()))


def _written(name: str, place: str, data: bytes) -> bytes:
    return f"event: {name}\nid: {place}\ndata: ".encode() + data + b"\n\n"
