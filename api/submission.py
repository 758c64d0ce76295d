"""The way in: past the door and into the queue, and, for clients that want their answer at once, back out of it."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError
from starlette.requests import Request

from scorepool import store, wire
from scorepool.api.http import tasks
from scorepool.api.http.bodies import while_connected
from scorepool.api.http.errors import (
    ApiError,
    BadRequest,
    Conflict,
    Failed,
    PromptTooLong,
    TooLarge,
    Unavailable,
    told_as,
)
from scorepool.api.repositories.queue import Submitted, fingerprint, job_ids
from scorepool.api.state import State

logger = logging.getLogger(__name__)

ANSWER_TTL_S = 60  # how long the results of synchronous requests are kept: they are read as soon as they are there


async def enter(
    parts: State,
    owner: str,
    messages: Sequence[wire.Request],
    key: str | None,
    count: int | None,
    ids: Sequence[str] | None = None,
    *,
    is_synchronous: bool = False,
) -> list[Submitted]:
    """Past the door and into the queue. What was accepted before under the same key is answered again, whatever the
    door says now: the model may have left since. Raises ApiError."""
    ids = ids or job_ids(owner, key, count)
    try:
        await parts.door.check(messages, is_bulk=count is not None)
    except ApiError:
        if key is None or not await parts.queue.known(messages, ids):
            raise
    named = parts.models.under_own_names(messages)
    ttl_s = ANSWER_TTL_S if is_synchronous else None
    submitted = await parts.queue.submit(owner, named, ids, fingerprint(messages), ttl_s, is_synchronous=is_synchronous)
    for job, message in zip(submitted, messages, strict=True):
        if job.is_replay:
            parts.metrics.replayed.inc()
        else:
            parts.metrics.submitted.labels(wire.kind_of(message)).inc()
    return submitted


async def follow(request: Request, parts: State, owner: str, id: str, wait_s: float) -> wire.Job:  # noqa: A002
    """The job when it has ended, or as it is after `wait_s`. Raises NotFound, ClientDisconnect."""
    if wait_s == 0:
        return await parts.records.read(owner, id)
    started_at = time.monotonic()
    with parts.metrics.waiting.track_inprogress():
        job = await while_connected(request, until_ended(parts, owner, id, wait_s))
    has_ended = job.status not in ("queued", "started")
    parts.metrics.waits.labels(str(has_ended).lower()).observe(time.monotonic() - started_at)
    return job


async def answer(
    request: Request,
    parts: State,
    owner: str,
    messages: Sequence[wire.Request],
    to_param: Callable[[str], str] = str,
) -> list[wire.Result]:
    """The results of all, in order, as soon as the last is there.

    Where one fails, where time runs out and where the client goes, the others are canceled: nobody has their ids.
    Raises ApiError, of fields as `to_param` names them, ClientDisconnect.
    """
    count = len(messages) if len(messages) > 1 else None
    with told_as(to_param):
        submitted = await enter(parts, owner, messages, None, count, is_synchronous=True)
        ids = [job.id for job in submitted]
        try:
            with parts.metrics.waiting.track_inprogress():
                return await while_connected(request, _results(parts, owner, ids))
        except BaseException:
            await asyncio.shield(cancel_all(parts, owner, ids))
            raise


def check_count(settings: store.Settings, count: int, field: str, noun: str) -> None:
    """Of jobs that a synchronous request asks for. Raises TooLarge."""
    if count > settings.max_bulk_jobs:
        raise TooLarge(
            f"{field}: expected at most {settings.max_bulk_jobs} {noun} in one request, found {count}", field
        )


def time_limit_s(settings: store.Settings) -> int:
    """How long a job of a synchronous request may run: no longer than its client is kept waiting."""
    return min(math.ceil(settings.max_wait_s), 86_400)


async def _results(parts: State, owner: str, ids: Sequence[str]) -> list[wire.Result]:
    waits = [asyncio.create_task(until_ended(parts, owner, id_, parts.settings.max_wait_s)) for id_ in ids]
    try:
        for ended in asyncio.as_completed(waits):
            job = await ended
            if job.result is None:
                raise refusal_of(job, parts.settings.max_wait_s)
        return [result for wait in waits if (result := wait.result().result) is not None]
    finally:
        await tasks.end(waits)


async def until_ended(parts: State, owner: str, id: str, wait_s: float) -> wire.Job:  # noqa: A002
    return await parts.waiting.until_ended(id, lambda: parts.records.read(owner, id), wait_s)


async def cancel_all(parts: State, owner: str, ids: Sequence[str]) -> None:
    """Those that have not ended. What cannot be canceled now ends by itself and expires."""
    for id_ in ids:
        try:
            await parts.queue.cancel(owner, id_)
        except ApiError:  # it has ended
            continue
        except RedisError as error:
            logger.warning("jobs of a request that nobody waits for run on: %r", error)
            return


def refusal_of(job: wire.Job, waited_s: float) -> ApiError:
    failure = job.failure
    if failure is None:
        return Unavailable(
            f"no answer within {waited_s:g} s, this server's limit, so the request was canceled; "
            "send less at once, or submit it with POST /v1/jobs and fetch the result later"
        )
    match failure.code:
        case "invalid":
            return BadRequest(failure.message, failure.field)
        case "too_long":
            return PromptTooLong(failure.message, failure.field)
        case "canceled":
            return Conflict(failure.message)
        case "timeout":
            return Unavailable(failure.message)
        case _:
            return Failed(f"{failure.code}: {failure.message}")
