"""Read the body of a request up to a limit, whatever its headers claim, and notice when the client disconnects."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from scorepool import wire
from scorepool.api.http import tasks
from scorepool.api.http.errors import TooLarge, TooSlow, UnsupportedMedia
from scorepool.api.http.formats import sent_format
from scorepool.api.http.held_bytes import receiving
from scorepool.api.http.turns import Turns

T = TypeVar("T")

# A client that sends more slowly than this is refused with 408.
BODY_GRACE_S = 20.0
BODY_BYTES_PER_S = 16 * 1024
MAX_MESSAGE_BYTES = 128 * 1024  # of a body that holds no jobs
MAX_INLINE_BYTES = 128 * 1024  # of a body that is parsed on the event loop
# Of a JSON body. A list or an object takes up to 250 bytes of memory, a string 50.
FREE_VALUES = 100_000
MIN_BYTES_PER_CONTAINER = 32
MIN_BYTES_PER_STRING = 16
PIECE_BYTES = 64 * 1024  # of a body whose brackets are counted
MAX_LENGTH_DIGITS = 18  # of a Content-Length that is read as a number


async def read_message(request: Request, message_type: type[T], max_bytes: int) -> T:
    """Read and decode a body of at most MAX_MESSAGE_BYTES. Raises UnsupportedMedia, TooLarge, TooSlow, wire.Invalid."""
    message_format = body_format(request)
    limits = (max_bytes, "SCOREPOOL_MAX_BODY_BYTES"), (MAX_MESSAGE_BYTES, "of this route")
    chunks = [chunk async for chunk in body_chunks(request, *min(limits))]
    return wire.parse(b"".join(chunks), message_type, message_format)


@dataclass(frozen=True, slots=True)
class Body:
    """A body that has been read."""

    owner: str  # whose request it is: large bodies of several owners are parsed in turns
    content: bytes
    message_format: wire.Format

    async def parse(self, parse: Callable[[bytes, wire.Format], T]) -> T:
        """Return what `parse` makes of the body. A large one is parsed in a thread, while others use the event loop.

        Raises TooLarge, and what `parse` raises.
        """
        if len(self.content) <= MAX_INLINE_BYTES:
            return parse(self.content, self.message_format)
        async with _turns.turn(self.owner):
            return await asyncio.get_running_loop().run_in_executor(_parsing, self._parse_large, parse)

    async def parse_message(self, message_type: type[T]) -> T:
        """Decode the body. Raises TooLarge, wire.Invalid."""

        def parse(content: bytes, message_format: wire.Format) -> T:
            wire.check_free_form(content, message_type, message_format)
            return wire.parse(content, message_type, message_format)

        return await self.parse(parse)

    def _parse_large(self, parse: Callable[[bytes, wire.Format], T]) -> T:
        if self.message_format == "json":
            _check_strings(self.content)
            _check_containers(self.content)
        gc.disable()  # it would look at all new objects again and again, for most of the time
        try:
            return parse(self.content, self.message_format)
        finally:
            gc.enable()


_parsing = ThreadPoolExecutor(1, "parse")  # one large body at a time: its memory is that of one
_turns = Turns()  # at `_parsing`


def _check_strings(body: bytes) -> None:
    """Check the number of strings in a JSON body before they are built. Raises TooLarge.

    They are counted by their quotes. A string that ends with a backslash counts half.
    """
    most = FREE_VALUES + len(body) // MIN_BYTES_PER_STRING
    found = (body.count(b'"') - body.count(b'\\"')) // 2
    if found > most:
        raise _too_many(body, "strings", found, most)


def _check_containers(body: bytes) -> None:
    """Check the number of lists and objects in a JSON body before they are built. Raises TooLarge."""
    most = FREE_VALUES + len(body) // MIN_BYTES_PER_CONTAINER
    if body.count(b"[") + body.count(b"{") <= most:
        return
    found = _num_containers(body)
    if found > most:
        raise _too_many(body, "lists and objects", found, most)


def _num_containers(body: bytes) -> int:
    """Count the brackets that open outside of strings. Piece by piece, because each call holds up the event loop."""
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    found, in_string = 0, 0
    for start in range(0, len(unescaped), PIECE_BYTES):
        parts = unescaped[start : start + PIECE_BYTES].split(b'"')
        outside = b"".join(parts[in_string::2])
        found += outside.count(b"[") + outside.count(b"{")
        in_string = (in_string + len(parts) - 1) % 2
    return found


def _too_many(body: bytes, noun: str, found: int, most: int) -> TooLarge:
    return TooLarge(
        f"the body holds {found} {noun}; expected at most {most} in {len(body)} bytes, send several requests"
    )


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


@asynccontextmanager
async def received_body(request: Request, owner: str, max_bytes: int) -> AsyncGenerator[Body]:
    """Read the whole body. Its bytes count as its owner's until the context ends: parse it there.

    Raises UnsupportedMedia, TooLarge, TooSlow, TooManyUploads.
    """
    message_format = body_format(request)
    with receiving(owner, max_bytes) as count:
        chunks = []
        async for chunk in body_chunks(request, max_bytes):
            count(len(chunk))
            chunks.append(chunk)
        content = b"".join(chunks)
        chunks.clear()
        yield Body(owner, content, message_format)


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
    what = {"SCOREPOOL_MAX_FILE_BYTES": "send several files", "SCOREPOOL_MAX_WEIGHTS_BYTES": "push a folder"}
    return TooLarge(
        f"the body is larger than {max_bytes} bytes, the limit {setting}; {what.get(setting, 'send several requests')}"
    )
