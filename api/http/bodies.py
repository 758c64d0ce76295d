"""Read the body of a request up to a limit, whatever its headers claim, and notice when the client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from scorepool import wire
from scorepool.api.http import tasks
from scorepool.api.http.errors import TooLarge, TooSlow, UnsupportedMedia
from scorepool.api.http.formats import sent_format

T = TypeVar("T")

# A client that sends more slowly than this is refused with 408.
BODY_GRACE_S = 20.0
BODY_BYTES_PER_S = 16 * 1024
MAX_LENGTH_DIGITS = 18  # of a Content-Length that is read as a number


async def read_message(request: Request, message_type: type[T], max_bytes: int) -> T:
    """Read and decode the body. Raises UnsupportedMedia, TooLarge, TooSlow, wire.Invalid."""
    message_format = body_format(request)
    return wire.parse(await read_body(request, max_bytes), message_type, message_format)


def body_format(request: Request) -> wire.Format:
    """Return the format that the headers name. Raises UnsupportedMedia."""
    content_encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if content_encoding != "identity":
        raise UnsupportedMedia(
            f"Content-Encoding: {wire.cut(content_encoding)} is not read; send the body as it is", "Content-Encoding"
        )
    try:
        return sent_format(request.headers.get("content-type"))
    except ValueError as error:
        raise UnsupportedMedia(str(error), "Content-Type") from None


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the whole body. Raises TooLarge, TooSlow."""
    return b"".join([chunk async for chunk in body_chunks(request, max_bytes)])


async def body_chunks(
    request: Request, max_bytes: int, setting: str = "SCOREPOOL_MAX_BODY_BYTES"
) -> AsyncGenerator[bytes]:
    """Yield the body as it arrives. The bytes are counted: Content-Length only serves to refuse early.

    `setting` is the name of the limit, for the error.

    Raises TooLarge, TooSlow.
    """
    claimed = request.headers.get("content-length", "")
    if claimed.isdecimal() and (len(claimed) > MAX_LENGTH_DIGITS or int(claimed) > max_bytes):
        raise _too_large(max_bytes, setting)
    num_bytes = 0
    started_at = asyncio.get_running_loop().time()
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout_at(started_at + BODY_GRACE_S + num_bytes / BODY_BYTES_PER_S):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise TooSlow(
                f"{num_bytes} bytes of the body came in time; expected {BODY_BYTES_PER_S} a second, "
                f"after a grace of {BODY_GRACE_S:g} s"
            ) from None
        if chunk is None:
            return
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes, setting)
        yield chunk


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it if the client disconnects. The body must have been read, or be empty.

    Raises ClientDisconnect.
    """
    running = (asyncio.create_task(work), asyncio.create_task(_until_disconnect(request)))
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if not running[0].done():
            raise ClientDisconnect
        return await running[0]
    finally:
        await tasks.cancel_and_wait(running)


async def _until_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _too_large(max_bytes: int, setting: str) -> TooLarge:
    return TooLarge(f"the body is larger than {max_bytes} bytes, the limit {setting}; send several requests")
