"""Serve /v1/files, as in OpenAI's API: the input and output files of batches."""

from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Depends, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from scorepool.api.dependencies import FilesDep, HeldResultsDep, KeyringDep, Owner, SettingsDep, known_query
from scorepool.api.dialects.openai.files import UploadFields
from scorepool.api.http import openapi
from scorepool.api.http.errors import Forbidden
from scorepool.api.http.file_reply import FileReply
from scorepool.api.http.formats import reply
from scorepool.api.http.uploads import uploaded
from scorepool.api.repositories.files import file_not_found
from scorepool.wire.file import FILE_KEPT_S, DeletedFile, FileObject, FilePage, Purpose

CONTENT_HEADERS: dict[str, Any] = {
    "X-Last-Line": {
        "description": "Lines up to the end of the reply: the next `offset`.",
        "schema": {"type": "integer"},
    },
    "X-Incomplete": {"description": "true: a running batch goes on writing.", "schema": {"enum": ["true", "false"]}},
}

router = APIRouter(prefix="/v1/files", tags=["openai"], dependencies=[Depends(known_query)])

FileId = Annotated[str, Path(alias="id")]
FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"const": "batch"},
                        "expires_after[anchor]": {"const": "created_at"},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": FILE_KEPT_S},
                    },
                    "required": ["file", "purpose"],
                }
            }
        },
    }
}


@router.post(
    "",
    summary="Upload a file for a batch",
    responses=openapi.responses({200: FileObject}, (400, 401, 408, 413, 415, 429, 503)),
    openapi_extra=FORM,
)
async def create(
    request: Request,
    owner: Owner,
    keyring: KeyringDep,
    settings: SettingsDep,
    files: FilesDep,
) -> Response:
    """Upload a JSONL file with one request per line. Its lines are checked when a batch is created from it."""
    if not keyring and "origin" in request.headers:  # a form is what browsers send across sites without asking
        raise Forbidden("files are not taken from web pages by a server without API keys", "Origin")
    with files.count_upload(owner):
        async with uploaded(request, UploadFields, settings.max_file_bytes) as upload:
            after = upload.fields.expires_after
            ttl_s = FILE_KEPT_S if after is None else after.seconds
            file = await files.save(owner, f"file-{uuid4().hex}", upload.filename, upload.file, ttl_s)
    return reply(file, "json")


@router.get("", summary="List files", responses=openapi.responses({200: FilePage}, (400, 401, 429, 503)))
async def page(
    owner: Owner,
    files: FilesDep,
    held: HeldResultsDep,
    after: Annotated[str | None, Query(max_length=64, description="`last_id` of the previous page.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Annotated[Literal["asc", "desc"], Query(description="Order by time of creation.")] = "desc",
    purpose: Annotated[Purpose | None, Query()] = None,
) -> Response:
    """List your files."""
    found, has_more = await files.page(owner, after, limit, purpose, order == "desc")
    first_id, last_id = (found[0].id, found[-1].id) if found else (None, None)
    return held.page(FilePage(data=found, first_id=first_id, last_id=last_id, has_more=has_more), "json")


@router.get(
    "/{id}", summary="Read the metadata of a file", responses=openapi.responses({200: FileObject}, (400, 401, 404, 503))
)
async def read(file_id: FileId, owner: Owner, files: FilesDep) -> Response:
    """Read a file's name, size and times."""
    return reply(await files.read(owner, file_id), "json")


@router.get(
    "/{id}/content",
    summary="Read the content of a file",
    responses=openapi.responses({}, (400, 401, 404, 429, 503))
    | {
        200: {
            "description": "OK",
            "headers": CONTENT_HEADERS,
            "content": {"application/octet-stream": {"schema": {"type": "string"}}},
        }
    },
)
async def content(
    file_id: FileId,
    request: Request,
    owner: Owner,
    files: FilesDep,
    held: HeldResultsDep,
    offset: Annotated[int, Query(ge=0, le=10**9, description="Number of lines to leave out.")] = 0,
) -> Response:
    """Download a file. The output of a running batch ends after the lines that are written so far."""
    file = await files.read(owner, file_id)
    num_bytes, pieces = await files.content(file, offset, held)
    first = await anext(pieces, b"")  # while an error can have a status: a later one cuts the reply off
    if num_bytes and not first:
        raise file_not_found(file_id)
    headers = {"X-Incomplete": "true" if file.status == "uploaded" else "false"}
    if file.num_lines is not None:
        headers["X-Last-Line"] = str(file.num_lines)
    return FileReply(request, first, pieces, num_bytes, headers)


@router.delete(
    "/{id}",
    summary="Delete a file",
    responses=openapi.responses({200: DeletedFile}, (400, 401, 404, 409, 503)),
)
async def delete(file_id: FileId, owner: Owner, files: FilesDep) -> Response:
    """Delete a file. 409: a batch reads or writes it."""
    await files.delete(owner, file_id)
    return reply(DeletedFile(id=file_id), "json")
