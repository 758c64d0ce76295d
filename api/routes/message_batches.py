"""Serve /v1/messages/batches, as in Anthropic's API: batches of lines (api/batches) under Anthropic's names."""

import io
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, Depends, Path, Query
from redis import RedisError
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import (
    BatchesDep,
    FilesDep,
    HeldResultsDep,
    ModelsDep,
    Owner,
    SettingsDep,
    beta,
    known_query,
)
from scorepool.api.dialects.anthropic import batch as dialect
from scorepool.api.dialects.anthropic.batch import (
    MESSAGES_PATH,
    CreateMessageBatch,
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchPage,
)
from scorepool.api.dialects.anthropic.endpoints import MESSAGES
from scorepool.api.http import openapi
from scorepool.api.http.bodies import received_body
from scorepool.api.http.error_forms import anthropic_error
from scorepool.api.http.errors import BadRequest, Conflict, NotFound, UnsupportedMedia
from scorepool.api.http.file_reply import FileReply
from scorepool.api.http.formats import reply
from scorepool.api.http.large_replies import HeldResults
from scorepool.api.http.tasks import in_turns
from scorepool.api.repositories.batches import Batches
from scorepool.api.repositories.files import Files
from scorepool.wire.batch import Batch, CreateBatch
from scorepool.wire.file import FILE_KEPT_S

logger = logging.getLogger(__name__)

WINDOW = "24h"
EXAMPLE = {"requests": [{"custom_id": "a", "params": MESSAGES.example}]}
ENDED = ("completed", "failed", "expired", "cancelled")
BatchId = Annotated[str, Path(alias="id")]
PageId = Annotated[str | None, Query(max_length=64)]
router = APIRouter(
    prefix="/v1/messages/batches", tags=["anthropic"], dependencies=[Depends(known_query), Depends(beta)]
)


def _responses(replies: dict[int, Any], *errors: int) -> dict[int | str, dict[str, Any]]:
    return openapi.responses(replies, (400, 401, *errors, 503), form="anthropic")


@router.post(
    "",
    summary="Create a batch of messages",
    name="create_message_batch",
    responses=_responses({200: MessageBatch}, 404, 408, 413, 415, 429),
    openapi_extra=openapi.request_body(CreateMessageBatch, EXAMPLE, ("json",)),
)
async def create(
    request: Request, owner: Owner, settings: SettingsDep, models: ModelsDep, files: FilesDep, batches: BatchesDep
) -> Response:
    """Create a batch. It is durable when this route answers, and ends within 24 hours."""
    async with received_body(request, owner, settings.max_body_bytes) as received:
        if received.message_format != "json":
            raise UnsupportedMedia("Content-Type: expected application/json", "Content-Type")
        body = await received.parse_message(CreateMessageBatch)
        named = dialect.models_of(body)
        lines = b"".join([line async for line in in_turns(dialect.to_lines(body))])
    serving = await models.serving(named)
    for name, index in named.items():
        if not serving[name]:
            raise models.not_served(name, f"requests[{index}].params.model")
    unique_id = uuid4().hex
    file_id = f"file-{unique_id}"
    with files.count_upload(owner):
        await files.save(owner, file_id, f"{dialect.PREFIX}{unique_id}.jsonl", _Upload(lines), FILE_KEPT_S)
    asked = CreateBatch(input_file_id=file_id, endpoint=MESSAGES_PATH, completion_window=WINDOW)
    try:
        created = await batches.create(owner, asked, unique_id, num_lines=len(body.requests))
    except BaseException:
        # A batch that was made although the reply was lost keeps its file; the first error is the one to tell.
        with suppress(Conflict, RedisError):
            await files.delete(owner, file_id)
        raise
    return reply(dialect.to_message_batch(created), "json")


@router.get("", summary="List batches of messages", responses=_responses({200: MessageBatchPage}, 429))
async def list_message_batches(
    owner: Owner,
    batches: BatchesDep,
    held: HeldResultsDep,
    before_id: PageId = None,
    after_id: PageId = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """List your batches of messages, newest first: those after `after_id`, or those before `before_id`."""
    if before_id is not None and after_id is not None:
        raise BadRequest("before_id: expected `before_id` or `after_id`, found both", "before_id")
    is_before = before_id is not None
    cursor = before_id if is_before else after_id
    after = None if cursor is None else dialect.own_id(cursor)
    try:
        found, has_more = await batches.page(owner, after, limit, endpoint=MESSAGES_PATH, newest_first=not is_before)
    except BadRequest as error:
        error.rename_field(lambda field: ("before_id" if is_before else "after_id") if field == "after" else field)
        raise
    return held.page(dialect.to_page(found[::-1] if is_before else found, has_more), "json")


@router.get("/{id}", summary="Read a batch of messages", responses=_responses({200: MessageBatch}, 404))
async def retrieve_message_batch(batch_id: BatchId, owner: Owner, batches: BatchesDep) -> Response:
    """Read a batch. `request_counts` counts the requests whose results are stored, also while it runs."""
    return reply(dialect.to_message_batch(await _read(batches, owner, batch_id)), "json")


@router.post("/{id}/cancel", summary="Cancel a batch of messages", responses=_responses({200: MessageBatch}, 404, 409))
async def cancel_message_batch(batch_id: BatchId, owner: Owner, batches: BatchesDep) -> Response:
    """Cancel a batch. Results of requests that have ended stay."""
    batch = await _read(batches, owner, batch_id)
    return reply(dialect.to_message_batch(await batches.cancel(owner, batch.id)), "json")


@router.delete(
    "/{id}", summary="Delete a batch of messages", responses=_responses({200: DeletedMessageBatch}, 404, 409)
)
async def delete_message_batch(batch_id: BatchId, owner: Owner, files: FilesDep, batches: BatchesDep) -> Response:
    """Delete a batch that has ended, and its results."""
    batch = await _read(batches, owner, batch_id)
    if batch.status not in ENDED:
        raise Conflict("id: the batch has not ended; cancel it first", "id")
    for file_id in (batch.output_file_id, batch.error_file_id, batch.input_file_id):
        if file_id is not None:
            await _delete_file(files, owner, file_id)
    await batches.delete(owner, batch.id)
    return reply(DeletedMessageBatch(id=batch_id), "json")


@router.get(
    "/{id}/results",
    summary="Read the results of a batch of messages",
    responses=_responses({}, 404, 409, 429)
    | {200: {"description": "OK", "content": {"application/x-jsonl": {"schema": {"type": "string"}}}}},
)
async def message_batch_results(
    batch_id: BatchId, request: Request, owner: Owner, files: FilesDep, batches: BatchesDep, held: HeldResultsDep
) -> Response:
    """Read the results of a batch that has ended, as lines of JSON in no particular order."""
    batch = await _read(batches, owner, batch_id)
    if batch.status not in ENDED:
        raise Conflict("id: the batch has not ended, so it has no results yet", "id")
    pieces = _results(files, owner, batch, held)
    first = await anext(pieces, b"")  # while an error can have a status: a later one cuts the reply off
    return FileReply(request, first, pieces, None, {"Content-Type": "application/x-jsonl"})


async def _read(batches: Batches, owner: str, batch_id: str) -> Batch:
    """Return a batch of messages. Raises NotFound, with the id that the client gave."""
    absent = NotFound(f"no batch {wire.quote(batch_id)}; batches are kept for 30 days after their end", "id")
    try:
        batch = await batches.read(owner, dialect.own_id(batch_id))
    except NotFound:
        raise absent from None
    if batch.endpoint != MESSAGES_PATH:
        raise absent
    return batch


async def _delete_file(files: Files, owner: str, file_id: str) -> None:
    try:
        await files.delete(owner, file_id)
    except NotFound:  # it has expired, or its owner has deleted it
        return


async def _results(files: Files, owner: str, batch: Batch, held: HeldResults) -> AsyncGenerator[bytes]:
    """Yield the results line by line, without lines that cannot be read. Raises NotFound, TooManyResults."""
    file_ids = [file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id is not None]
    for file_id in file_ids or [batch.input_file_id]:
        async for line in _lines(files, owner, file_id, held):
            try:
                if file_ids:
                    yield dialect.to_result(line, anthropic_error)
                else:
                    yield dialect.to_result_of_none(line, batch, anthropic_error)
            except wire.Invalid as error:
                logger.warning("a line of the file %s cannot be read: %s", file_id, error.field)


async def _lines(files: Files, owner: str, file_id: str, held: HeldResults) -> AsyncGenerator[bytes]:
    _, pieces = await files.content(await files.read(owner, file_id), 0, held)
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line


class _Upload:
    """Give bytes as an upload."""

    def __init__(self, content: bytes) -> None:
        self._read: Callable[[int], bytes] = io.BytesIO(content).read

    async def read(self, size: int) -> bytes:
        return self._read(size)
