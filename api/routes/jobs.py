"""Serve /v1/jobs: submit, read, list, cancel and delete jobs."""

import logging
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from msgspec import Meta
from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import (
    Cursor,
    HeldResultsDep,
    IdempotencyKey,
    JobRepliesDep,
    JobsDep,
    Limit,
    Owner,
    PreferredWait,
    QueueDep,
    ReplyFormat,
    SettingsDep,
    SubmissionDep,
    UnixTime,
    WaitS,
    known_query,
)
from scorepool.api.http import openapi
from scorepool.api.http.bodies import received_body
from scorepool.api.http.errors import BadRequest, TooLarge
from scorepool.api.http.formats import reply
from scorepool.api.repositories.jobs import ENDED, JobFilter
from scorepool.api.repositories.queue import Submitted

logger = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/jobs", tags=["jobs"], dependencies=[Depends(known_query)])

JobId = Annotated[str, Path(alias="id")]
JobIds = Annotated[
    str, Query(min_length=1, description=f"Ids of jobs, separated by commas: at most {wire.MAX_ENDED_JOBS}.")
]
Bulk = Annotated[list[wire.Request], Meta(min_length=1)]
_EXAMPLES = [
    {"type": "score", "model": "demo", "items": [{"prompt": "import", "completion": " os"}]},
    {"type": "generate", "model": "demo", "prompt": "import", "max_tokens": 8},
]
SUBMIT_ERRORS = (400, 401, 403, 404, 406, 408, 409, 413, 415, 429, 503)


@router.post(
    "",
    status_code=202,
    summary="Submit a job",
    responses=openapi.responses({202: wire.Accepted, 200: wire.Job}, SUBMIT_ERRORS),
    openapi_extra=openapi.request_body(wire.Request, _EXAMPLES[0])
    | openapi.request_headers("Idempotency-Key", "Prefer"),
)
async def submit(
    request: Request,
    owner: Owner,
    reply_format: ReplyFormat,
    key: IdempotencyKey,
    wait_s: PreferredWait,
    settings: SettingsDep,
    submission: SubmissionDep,
    replies: JobRepliesDep,
    held: HeldResultsDep,
) -> Response:
    """Submit a job. It is durable when this route answers.

    With `Prefer: wait=N` the answer is the job, if it ends within N seconds.
    """
    async with received_body(request, owner, settings.max_body_bytes) as body:
        job_request: wire.Request = await body.parse_message(wire.Request)  # type: ignore[arg-type]
    del body  # the client may wait for long
    [submitted] = await submission.submit(owner, [job_request], key, is_bulk=False)
    location = f"/v1/jobs/{submitted.id}"
    headers = {"Location": location} | _replayed([submitted])
    if wait_s is None:
        return reply(_accepted(submitted), reply_format, 202, headers)
    granted_s = min(wait_s, int(settings.max_wait_s))
    headers["Preference-Applied"] = f"wait={granted_s}"
    held.leaves_stored = True
    try:
        job = await submission.wait_for_job(request, owner, submitted.id, held, granted_s)
    except RedisError as error:  # the job is in Redis, so its id must reach the client
        logger.warning("cannot wait for the accepted job %s: %r", submitted.id, error)
        return reply(_accepted(submitted), reply_format, 202, headers)
    if job.status not in ENDED:
        return reply(_accepted(submitted, job.status), reply_format, 202, headers)
    return await replies.reply(request, owner, job, held, reply_format, headers)


@router.post(
    "/bulk",
    status_code=202,
    summary="Submit many jobs",
    responses=openapi.responses({202: list[wire.Accepted]}, SUBMIT_ERRORS),
    openapi_extra=openapi.request_body(Bulk, _EXAMPLES) | openapi.request_headers("Idempotency-Key"),
)
async def submit_bulk(
    request: Request,
    owner: Owner,
    reply_format: ReplyFormat,
    key: IdempotencyKey,
    settings: SettingsDep,
    submission: SubmissionDep,
) -> Response:
    """Submit jobs: all are accepted, or none. The answer has their order."""
    async with received_body(request, owner, settings.max_body_bytes) as body:
        count = await body.parse(wire.count_objects)
        if count > settings.max_bulk_jobs:
            raise TooLarge(
                f"expected at most {settings.max_bulk_jobs} jobs in one request (SCOREPOOL_MAX_BULK_JOBS), "
                f"found {count}"
            )
        requests: list[wire.Request] = await body.parse_message(Bulk)
    submitted = await submission.submit(owner, requests, key, is_bulk=True)
    return reply([_accepted(job) for job in submitted], reply_format, 202, _replayed(submitted))


def _accepted(job: Submitted, status: wire.Status | None = None) -> wire.Accepted:
    location = f"/v1/jobs/{job.id}"
    return wire.Accepted(id=job.id, status=status or job.status, location=location, is_replay=job.is_replay)


def _replayed(jobs: list[Submitted]) -> dict[str, str]:
    return {"Idempotent-Replayed": "true"} if all(job.is_replay for job in jobs) else {}


@router.get(
    "/ended",
    summary="Read jobs that have ended, or wait for the first of them",
    responses=openapi.responses({200: list[wire.Job]}, (400, 401, 404, 406, 429, 503)),
)
async def read_ended(
    request: Request,
    owner: Owner,
    reply_format: ReplyFormat,
    settings: SettingsDep,
    submission: SubmissionDep,
    held: HeldResultsDep,
    ids: JobIds,
    wait: WaitS = 0,
) -> Response:
    """Read the jobs at the start of `ids` that have ended, up to the first that has not.

    Small results come together in this way. If the first job has not ended, wait for it; without it, the list is empty.
    A list ends after some MiB, and with a job whose result is in the result store, which comes without it:
    `GET /v1/jobs/{id}` reads that.
    """
    job_ids = ids.split(",")
    if len(job_ids) > wire.MAX_ENDED_JOBS:
        raise BadRequest(f"ids: expected at most {wire.MAX_ENDED_JOBS} ids, found {len(job_ids)}", "ids")
    granted_s = min(wait, settings.max_wait_s)
    headers = {"Preference-Applied": f"wait={granted_s:g}"} if granted_s < wait else {}
    held.leaves_stored = True
    ended = await submission.read_ended(request, owner, job_ids, held, granted_s)
    return await held.reply(lambda: ended, reply_format, headers=headers)


@router.get(
    "/{id}",
    summary="Read a job, or wait until it has ended",
    responses=openapi.responses({200: wire.Job}, (400, 401, 404, 406, 429, 503)),
)
async def read(
    job_id: JobId,
    request: Request,
    owner: Owner,
    reply_format: ReplyFormat,
    settings: SettingsDep,
    submission: SubmissionDep,
    replies: JobRepliesDep,
    held: HeldResultsDep,
    wait: WaitS = 0,
) -> Response:
    """Read a job. `status` says whether it has ended.

    A `wait` above the server's limit is cut to it, and `Preference-Applied` echoes the limit.
    """
    granted_s = min(wait, settings.max_wait_s)
    headers = {"Preference-Applied": f"wait={granted_s:g}"} if granted_s < wait else {}
    held.leaves_stored = True
    job = await submission.wait_for_job(request, owner, job_id, held, granted_s)
    return await replies.reply(request, owner, job, held, reply_format, headers)


@router.get(
    "",
    summary="List jobs, newest first",
    responses=openapi.responses({200: wire.JobPage}, (400, 401, 406, 503)),
)
async def page(
    owner: Owner,
    reply_format: ReplyFormat,
    jobs: JobsDep,
    status: Annotated[wire.Status | None, Query()] = None,
    model: Annotated[str | None, Query(max_length=128)] = None,
    kind: Annotated[wire.Kind | None, Query()] = None,
    created_from: UnixTime = None,
    created_before: UnixTime = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Response:
    """List your jobs, without results.

    Of those created from `created_from` on and before `created_before`. If few jobs match, a page can be short or
    empty and still have a `next_cursor`.
    """
    wanted = JobFilter(status, model, kind, created_from, created_before)
    return reply(await jobs.page(owner, cursor, limit, wanted), reply_format)


@router.post(
    "/{id}/cancel",
    summary="Cancel a job",
    responses=openapi.responses({200: wire.Job, 202: wire.Job}, (400, 401, 404, 406, 409, 429, 503)),
)
async def cancel(
    job_id: JobId, owner: Owner, reply_format: ReplyFormat, queue: QueueDep, jobs: JobsDep, held: HeldResultsDep
) -> Response:
    """Cancel a job.

    200: it is canceled. 202: it runs, and its worker is asked to stop it. 409: it has finished or failed.
    """
    await queue.cancel(owner, job_id)
    job = await jobs.read(owner, job_id, held)
    return await held.reply(lambda: job, reply_format, 202 if job.status == "started" else 200)


@router.delete(
    "/{id}",
    status_code=204,
    summary="Delete an ended job",
    responses=openapi.responses({}, (400, 401, 404, 409, 503)),
)
async def delete(job_id: JobId, owner: Owner, queue: QueueDep) -> Response:
    """Delete a job with its request, its result and its deliveries. Its Idempotency-Key can be used again."""
    await queue.delete(owner, job_id)
    return Response(status_code=204)
