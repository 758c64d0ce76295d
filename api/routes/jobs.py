"""/v1/jobs: submit, follow, list, cancel, delete."""

import logging
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from msgspec import Meta
from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import (
    Cursor,
    IdempotencyKey,
    Limit,
    Owner,
    Parts,
    PreferredWait,
    ReplyFormat,
    WaitS,
    known_query,
)
from scorepool.api.http import openapi
from scorepool.api.http.bodies import read_message
from scorepool.api.http.errors import TooLarge
from scorepool.api.http.formats import reply
from scorepool.api.repositories.queue import Submitted
from scorepool.api.submission import enter, follow

logger = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/jobs", tags=["jobs"], dependencies=[Depends(known_query)])

Bulk = Annotated[list[wire.Request], Meta(min_length=1)]
SUBMIT_ERRORS = (400, 401, 404, 406, 408, 409, 413, 415, 429, 503)


@router.post(
    "",
    status_code=202,
    summary="Submit a job",
    responses=openapi.answers({202: wire.Accepted, 200: wire.Job}, SUBMIT_ERRORS),
    openapi_extra=openapi.body(wire.Request) | openapi.headers("Idempotency-Key", "Prefer"),
)
async def submit(
    request: Request,
    owner: Owner,
    form: ReplyFormat,
    key: IdempotencyKey,
    wait_s: PreferredWait,
    parts: Parts,
) -> Response:
    """The job is durable when this answers. With `Prefer: wait=N` the answer is the ended job, if it ends in time."""
    message: wire.Request = await read_message(request, wire.Request, parts.settings.max_body_bytes)  # type: ignore[arg-type]
    [submitted] = await enter(parts, owner, [message], key, None)
    location = f"/v1/jobs/{submitted.id}"
    headers = {"Location": location} | _replayed([submitted])
    if wait_s is None:
        return reply(_accepted(submitted), form, 202, headers)
    granted_s = min(wait_s, int(parts.settings.max_wait_s))
    headers["Preference-Applied"] = f"wait={granted_s}"
    try:
        job = await follow(request, parts, owner, submitted.id, granted_s)
    except RedisError as error:  # the job is in Redis, and its id must reach the caller
        logger.warning("no wait for the accepted job %s: %r", submitted.id, error)
        return reply(_accepted(submitted), form, 202, headers)
    if job.status in ("queued", "started"):
        return reply(wire.Accepted(id=job.id, status=job.status, location=location), form, 202, headers)
    return reply(job, form, 200, headers)


@router.post(
    "/bulk",
    status_code=202,
    summary="Submit many jobs",
    responses=openapi.answers({202: list[wire.Accepted]}, SUBMIT_ERRORS),
    openapi_extra=openapi.body(Bulk) | openapi.headers("Idempotency-Key"),
)
async def submit_bulk(request: Request, owner: Owner, form: ReplyFormat, key: IdempotencyKey, parts: Parts) -> Response:
    """All are accepted, or none. The answer follows the order of the requests."""
    messages: list[wire.Request] = await read_message(request, Bulk, parts.settings.max_body_bytes)
    if len(messages) > parts.settings.max_bulk_jobs:
        raise TooLarge(f"expected at most {parts.settings.max_bulk_jobs} jobs in one request, found {len(messages)}")
    submitted = await enter(parts, owner, messages, key, len(messages))
    return reply([_accepted(job) for job in submitted], form, 202, _replayed(submitted))


def _accepted(job: Submitted) -> wire.Accepted:
    return wire.Accepted(id=job.id, status=job.status, location=f"/v1/jobs/{job.id}")


def _replayed(jobs: list[Submitted]) -> dict[str, str]:
    return {"Idempotent-Replayed": "true"} if all(job.is_replay for job in jobs) else {}


@router.get(
    "/{id}",
    summary="Read a job, or wait for its end",
    responses=openapi.answers({200: wire.Job}, (400, 401, 404, 406, 503)),
)
async def read(
    id: str,  # noqa: A002
    request: Request,
    owner: Owner,
    form: ReplyFormat,
    parts: Parts,
    wait: WaitS = 0,
) -> Response:
    """`status` says whether it has ended. A `wait` above the server's cap is cut: `Preference-Applied` says to what."""
    granted_s = min(wait, parts.settings.max_wait_s)
    headers = {"Preference-Applied": f"wait={granted_s:g}"} if granted_s < wait else {}
    return reply(await follow(request, parts, owner, id, granted_s), form, headers=headers)


@router.get(
    "",
    summary="List jobs, newest first",
    responses=openapi.answers({200: wire.JobPage}, (400, 401, 406, 503)),
)
async def page(
    owner: Owner,
    form: ReplyFormat,
    parts: Parts,
    status: Annotated[wire.Status | None, Query()] = None,
    model: Annotated[str | None, Query(max_length=128)] = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Response:
    """Without results. A filter that matches little can give a short or empty page that still has a `next_cursor`."""
    return reply(await parts.records.page(owner, status, model, cursor, limit), form)


@router.post(
    "/{id}/cancel",
    summary="Cancel a job",
    responses=openapi.answers({200: wire.Job, 202: wire.Job}, (400, 401, 404, 406, 409, 503)),
)
async def cancel(id: str, owner: Owner, form: ReplyFormat, parts: Parts) -> Response:  # noqa: A002
    """200: it is canceled, now or before. 202: it runs, and its worker was told. 409: it has finished or failed."""
    await parts.queue.cancel(owner, id)
    job = await parts.records.read(owner, id)
    return reply(job, form, 202 if job.status == "started" else 200)


@router.delete(
    "/{id}",
    status_code=204,
    summary="Delete an ended job",
    responses=openapi.answers({}, (400, 401, 404, 409, 503)),
)
async def delete(id: str, owner: Owner, parts: Parts) -> Response:  # noqa: A002
    """With its request, its result and a webhook not yet delivered. Its Idempotency-Key is free again."""
    await parts.queue.delete(owner, id)
    return Response(status_code=204)
