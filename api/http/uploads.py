"""Read a file uploaded as multipart/form-data: spooled to this machine's disk, so that no upload is held in memory."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import python_multipart  # noqa: F401 - if it is missing, starlette reports it at the first upload only
from msgspec import Struct
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from scorepool import wire
from scorepool.api.http.bodies import body_chunks
from scorepool.api.http.errors import BadRequest, TooLarge, UnsupportedMedia

FRAME_BYTES = 64 * 1024  # what a body may have beside the file: boundaries, headers, other fields
MAX_FIELDS = 8

T = TypeVar("T")


class Uploaded(Struct, Generic[T], frozen=True):
    """Hold a form with a file."""

    fields: T  # the form's other fields
    filename: str
    file: UploadFile


class StrictFormParser(MultiPartParser):
    """Refuse a body that is cut off. Starlette's parser would accept the part that came and leave its file open."""

    def __init__(self, headers: Headers, chunks: AsyncGenerator[bytes]) -> None:
        super().__init__(headers, self._until_last_boundary(chunks), max_files=1, max_fields=MAX_FIELDS)
        self._has_ended = False

    def on_end(self) -> None:
        """Note that the last boundary came; called by the parser."""
        self._has_ended = True

    async def _until_last_boundary(self, chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        async for chunk in chunks:
            yield chunk
        if not self._has_ended:
            raise MultiPartException("it ends before its last boundary")


@asynccontextmanager
async def uploaded(request: Request, fields_type: type[T], max_bytes: int) -> AsyncGenerator[Uploaded[T]]:
    """Parse the form; the file is deleted from the disk when the context ends.

    Raises UnsupportedMedia, TooLarge, TooSlow, BadRequest, wire.Invalid.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        raise UnsupportedMedia("Content-Type: expected multipart/form-data", "Content-Type")
    chunks = body_chunks(request, max_bytes + FRAME_BYTES, "SCOREPOOL_MAX_FILE_BYTES")
    try:
        form = await StrictFormParser(request.headers, chunks).parse()
    except MultiPartException as error:
        raise BadRequest(f"the body is not multipart/form-data: {error.message}") from None
    try:
        texts = {name: value for name, value in form.multi_items() if isinstance(value, str)}
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise BadRequest("file: expected a file, with its name", "file")
        if (file.size or 0) > max_bytes:
            raise TooLarge(
                f"file: expected at most {max_bytes} bytes (SCOREPOOL_MAX_FILE_BYTES), found {file.size}", "file"
            )
        yield Uploaded(_parse_fields(texts, fields_type), file.filename or "", file)
    finally:
        await form.close()


def _parse_fields(texts: dict[str, str], fields_type: type[T]) -> T:
    """Decode the fields of a form. OpenAI's SDK writes nested ones as `expires_after[seconds]`. Raises wire.Invalid."""
    fields: dict[str, object] = {}
    after: dict[str, object] = {}
    for name, text in texts.items():
        if name.startswith("expires_after[") and name.endswith("]"):
            after[name[len("expires_after[") : -1]] = int(text) if text.isascii() and text.isdecimal() else text
        else:
            fields[name] = text
    if after:
        fields["expires_after"] = after
    return wire.parse(wire.encode_json(fields), fields_type)
