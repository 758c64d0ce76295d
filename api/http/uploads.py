"""Read a file uploaded as multipart/form-data: spooled to this machine's disk, so that no upload is held in memory.

Names and fields are UTF-8. A charset is refused: the form parser would decode with any codec that Python has.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import python_multipart  # noqa: F401 - if it is missing, starlette reports it at the first upload only
from msgspec import Struct
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from scorepool import wire
from scorepool.api.http.bodies import body_chunks
from scorepool.api.http.errors import BadRequest, TooLarge, UnsupportedMedia
from scorepool.api.http.forms import MAX_FIELDS, check_field_names

FRAME_BYTES = 64 * 1024  # what a body may have beside the file: boundaries, headers, other fields
MAX_FIELD_BYTES = 1024
MAX_DIGITS = 18  # of a field that is read as a number
UTF8 = (b"utf-8", b"utf8")

T = TypeVar("T")


class Uploaded(Struct, Generic[T], frozen=True):
    """Hold a form with a file."""

    fields: T  # the form's other fields
    filename: str
    file: UploadFile


class StrictFormParser(MultiPartParser):
    """Refuse a body that is cut off or not UTF-8.

    Starlette's parser would accept the part that came and leave its file open, and guess an encoding.
    """

    def __init__(self, headers: Headers, chunks: AsyncGenerator[bytes]) -> None:
        super().__init__(
            headers,
            self._until_last_boundary(chunks),
            max_files=1,
            max_fields=MAX_FIELDS,
            max_part_size=MAX_FIELD_BYTES,
        )
        self._has_ended = False

    def on_end(self) -> None:
        """Note that the last boundary came; called by the parser."""
        self._has_ended = True

    def on_headers_finished(self) -> None:
        """Check the headers of a part; called by the parser."""
        for _, value in self._current_part.item_headers:
            _check_utf8(value, "a header of a part")
            if parse_options_header(value)[1].get(b"charset", UTF8[0]).lower() not in UTF8:
                raise MultiPartException("a part names a charset, expected UTF-8")
        super().on_headers_finished()

    def on_part_end(self) -> None:
        """Check a field; called by the parser."""
        if self._current_part.file is None:
            _check_utf8(bytes(self._current_part.data), f"the field {wire.quote(self._current_part.field_name)}")
        super().on_part_end()

    async def _until_last_boundary(self, chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        async for chunk in chunks:
            yield chunk
        if not self._has_ended:
            raise MultiPartException("it ends before its last boundary")


def _check_utf8(value: bytes, name: str) -> None:
    try:
        value.decode()
    except UnicodeDecodeError:
        raise MultiPartException(f"{name} is not UTF-8") from None


@asynccontextmanager
async def uploaded(request: Request, fields_type: type[T], max_bytes: int) -> AsyncGenerator[Uploaded[T]]:
    """Parse the form; the file is deleted from the disk when the context ends.

    Raises UnsupportedMedia, TooLarge, TooSlow, BadRequest, wire.Invalid.
    """
    media_type, parameters = parse_options_header(request.headers.get("content-type", ""))
    if media_type.strip() != b"multipart/form-data":
        raise UnsupportedMedia("Content-Type: expected multipart/form-data", "Content-Type")
    charset = parameters.get(b"charset", UTF8[0])
    if charset.lower() not in UTF8:
        found = wire.quote(charset.decode("latin-1"))
        raise UnsupportedMedia(f"Content-Type: expected the charset utf-8 or none, found {found}", "Content-Type")
    chunks = body_chunks(request, max_bytes + FRAME_BYTES, "SCOREPOOL_MAX_FILE_BYTES")
    try:
        form = await StrictFormParser(request.headers, chunks).parse()
    except MultiPartException as error:
        raise BadRequest(f"the body is not multipart/form-data: {error.message}") from None
    try:
        check_field_names(name for name, _ in form.multi_items())
        texts = {name: value for name, value in form.items() if isinstance(value, str)}
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
            is_number = text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
            after[name[len("expires_after[") : -1]] = int(text) if is_number else text
        else:
            fields[name] = text
    if after:
        fields["expires_after"] = after
    return wire.parse(wire.encode_json(fields), fields_type)
