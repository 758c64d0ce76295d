"""Serve /v1/batches, as in OpenAI's API: many requests from a file, with their answers in a file."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from scorepool.api.dependencies import (
    BatchesDep,
    HeldResultsDep,
    IdempotencyKey,
    Owner,
    QueueDep,
    SettingsDep,
    known_query,
)
from scorepool.api.http import openapi
from scorepool.api.http.bodies import read_message
from scorepool.api.http.formats import reply
from scorepool.wire.batch import Batch, BatchPage, CreateBatch

BatchId = Annotated[str, Path(alias="id")]
router = APIRouter(prefix="/v1/batches", tags=["openai"], dependencies=[Depends(known_query)])


@router.post(
    "",
    summary="Create a batch from a file",
    responses=openapi.responses({200: Batch}, (400, 401, 404, 408, 409, 413, 415, 503)),
    openapi_extra=openapi.request_body(CreateBatch) | openapi.request_headers("Idempotency-Key"),
)
async def create(
    request: Request, owner: Owner, key: IdempotencyKey, settings: SettingsDep, queue: QueueDep, batches: BatchesDep
) -> Response:
    """Create a batch. It is durable when this route answers. Its end can be polled, or sent as a `batch.*` event."""
    body = await read_message(request, CreateBatch, settings.max_body_bytes)
    [unique_id] = await queue.job_ids(owner, key, None)
    return reply(await batches.create(owner, body, unique_id), "json")


@router.get(
    "", summary="List batches, newest first", responses=openapi.responses({200: BatchPage}, (400, 401, 429, 503))
)
async def page(
    owner: Owner,
    batches: BatchesDep,
    held: HeldResultsDep,
    after: Annotated[str | None, Query(max_length=64, description="`last_id` of the previous page.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """List your batches."""
    found, has_more = await batches.page(owner, after, limit)
    first_id, last_id = (found[0].id, found[-1].id) if found else (None, None)
    return held.page(BatchPage(data=found, first_id=first_id, last_id=last_id, has_more=has_more), "json")


@router.get("/{id}", summary="Read a batch", responses=openapi.responses({200: Batch}, (400, 401, 404, 503)))
async def read(batch_id: BatchId, owner: Owner, batches: BatchesDep) -> Response:
    """Read a batch. `request_counts` counts the lines whose answers are stored."""
    return reply(await batches.read(owner, batch_id), "json")


@router.post(
    "/{id}/cancel",
    summary="Cancel a batch",
    responses=openapi.responses({200: Batch}, (400, 401, 404, 409, 503)),
)
async def cancel(batch_id: BatchId, owner: Owner, batches: BatchesDep) -> Response:
    """Cancel a batch. Its files, with the answers so far, are available when the status is `cancelled`."""
    return reply(await batches.cancel(owner, batch_id), "json")
