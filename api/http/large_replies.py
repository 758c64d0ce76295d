"""Read results and write replies so that large ones hold up nobody, and so that few are in memory at once."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scorepool import wire
from scorepool.api.http.errors import TooManyResults
from scorepool.api.http.formats import reply
from scorepool.api.http.held_bytes import Held, HeldBytes
from scorepool.api.http.turns import Turns
from scorepool.wire.stored_result import StoredResult

logger = logging.getLogger(__name__)
T = TypeVar("T")

LARGE_BYTES = 256 * 1024  # of results as they are stored, that are handled in a thread
# Of results, of one API process: as they are stored, then as they are sent.
MAX_BYTES_OF_OWNER = 64 * 2**20
MAX_BYTES = 256 * 2**20
PIECE_BYTES = 256 * 1024  # of a reply that is handed to the connection at once
# A client that takes a large reply more slowly than this is cut off.
READ_GRACE_S = 20.0
READ_BYTES_PER_S = 256 * 1024

_encoding = ThreadPoolExecutor(1, "reply")  # one large result at a time: its objects take several times its bytes
_turns = Turns()  # at `_encoding`
_held = HeldBytes()


class HeldResults:
    """The results that one request has read, until its reply has been sent."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self.leaves_stored = False  # True: who reads a job whose result is in the result store gets it in `stored`
        self.stored: StoredResult | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes that are counted."""
        return self._held.num_bytes

    def add(self, num_bytes: int) -> None:
        """Count the bytes of a result before it is read. Raises TooManyResults."""
        self._held.add(num_bytes)

    def add_up_to(self, num_bytes: int) -> None:
        """Count so many bytes in all, unless more are counted. Raises TooManyResults."""
        self._held.add(max(0, num_bytes - self._held.num_bytes))

    def count_reply(self, num_bytes: int) -> None:
        """Count the bytes of the encoded reply instead of the results, if they are more."""
        self._held.resize(max(self._held.num_bytes, num_bytes))

    async def run(self, work: Callable[[], T], *, is_large: bool = False) -> T:
        """Return what `work` makes of the results: in a thread if they are large, or if `work` is."""
        if self._held.num_bytes <= LARGE_BYTES and not is_large:
            return work()
        async with _turns.turn(self._held.owner):
            return await asyncio.get_running_loop().run_in_executor(_encoding, work)

    async def reply(
        self,
        make_message: Callable[[], object],
        reply_format: wire.Format,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        *,
        is_large: bool = False,
    ) -> Response:
        """Encode the message that is made of the results as a reply."""

        def encode() -> Response:
            return reply(make_message(), reply_format, status, headers)

        response = await self.run(encode, is_large=is_large)
        if len(response.body) > LARGE_BYTES:
            self.count_reply(len(response.body))
        return _in_pieces(response)

    def page(self, message: object, reply_format: wire.Format) -> Response:
        """Encode a page of a list, which its reader may take slowly. Raises TooManyResults."""
        response = reply(message, reply_format)
        self._held.add(len(response.body))
        return _in_pieces(response)

    async def rendered(self, render: Callable[[], Response], *, is_large: bool) -> Response:
        """Render a reply of the results, which its reader may take slowly. Raises TooManyResults."""
        response = await self.run(render, is_large=is_large)
        self._held.add(max(0, len(response.body) - self._held.num_bytes))
        return _in_pieces(response)


@contextlib.contextmanager
def held_results(owner: str) -> Iterator[HeldResults]:
    """Give what counts the results of one request until the context ends."""
    with _held.request(owner, MAX_BYTES_OF_OWNER, MAX_BYTES, _refusal) as held:
        yield HeldResults(held)


@contextlib.contextmanager
def own_results(owner: str) -> Iterator[HeldResults]:
    """Give what counts results for a task of the server's own, which bounds what it reads by itself."""
    with HeldBytes().request(owner, sys.maxsize, sys.maxsize, _refusal) as held:
        yield HeldResults(held)


def _refusal(most: int, is_own: bool) -> TooManyResults:
    if is_own:
        return TooManyResults(
            f"your requests are reading results of more than {most} bytes at once; wait until one has been sent"
        )
    return TooManyResults(f"this server is sending results of more than {most} bytes; try again soon")


def _in_pieces(response: Response) -> Response:
    return response if len(response.body) <= LARGE_BYTES else _LargeReply(response)


class _LargeReply(Response):
    """Send a reply in pieces. A client that takes them too slowly is cut off."""

    def __init__(self, response: Response) -> None:
        super().__init__(status_code=response.status_code)
        self.raw_headers = response.raw_headers
        self.body = response.body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with contextlib.suppress(ClientDisconnect):
            await send_body(send, bytes(self.body))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_body(send: Send, body: bytes) -> None:
    """Send a part of a reply in pieces, and return when the connection has room for more.

    Raises ClientDisconnect if the client takes them too slowly: the server then closes the connection.
    """
    started_at = asyncio.get_running_loop().time()
    for start in range(0, len(body), PIECE_BYTES):
        await _send_in_time(send, body[start : start + PIECE_BYTES], started_at + start / READ_BYTES_PER_S)
    if len(body) > PIECE_BYTES:
        await _send_in_time(send, b"", started_at + len(body) / READ_BYTES_PER_S)


async def _send_in_time(send: Send, piece: bytes, due_at: float) -> None:
    """Send a piece when the connection has room. `due_at` is when the client has read the ones before at the rate."""
    try:
        async with asyncio.timeout_at(due_at + READ_GRACE_S):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except TimeoutError:
        logger.info("a client that reads less than %d bytes/s of a large reply is cut off", READ_BYTES_PER_S)
        raise ClientDisconnect from None
