"""Send a file piece by piece."""

import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping

from redis.exceptions import RedisError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scorepool.api.http.bodies import while_connected
from scorepool.api.http.errors import ApiError, request_id
from scorepool.api.http.large_replies import send_body

logger = logging.getLogger(__name__)


class FileReply(Response):
    """Send pieces as they are read. The connection is closed early if they end early, or are taken too slowly."""

    media_type = "application/octet-stream"

    def __init__(
        self,
        request: Request,
        first: bytes,
        pieces: AsyncGenerator[bytes],
        num_bytes: int | None,
        headers: Mapping[str, str],
    ) -> None:
        """`pieces` are those after the first. `num_bytes` is None if their length is not known."""
        # The length shows a client that the file was cut off. Without it, the last chunk does.
        length = {} if num_bytes is None else {"Content-Length": str(num_bytes)}
        super().__init__(headers={**headers, **length})
        if num_bytes is None:
            del self.headers["Content-Length"]
        self._request = request
        self._first = first
        self._pieces = pieces
        self._num_bytes = num_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            with contextlib.suppress(ClientDisconnect):
                await while_connected(self._request, self._send_pieces(send))
        finally:
            await self._pieces.aclose()

    async def _send_pieces(self, send: Send) -> None:
        num_sent = len(self._first)
        try:
            await send_body(send, self._first)
            async for piece in self._pieces:
                await send_body(send, piece)
                num_sent += len(piece)
        except (ApiError, RedisError, OSError) as error:
            logger.warning("%s: a file is cut off: %r", request_id(self._request), error)
            return
        if self._num_bytes in (None, num_sent):
            await send({"type": "http.response.body", "body": b"", "more_body": False})
