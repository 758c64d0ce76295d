"""Send a job whose result is in the result store, one frame at a time: no more of it is in memory."""

import logging
from collections.abc import AsyncGenerator, Mapping

from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scorepool import wire
from scorepool.api.http.bodies import while_connected
from scorepool.api.http.errors import Unavailable
from scorepool.api.http.formats import MEDIA_TYPES
from scorepool.api.http.large_replies import LARGE_BYTES, HeldResults, send_body
from scorepool.wire.stored_result import count_sequences, decode_head, decode_sequences, without_array_header

logger = logging.getLogger(__name__)
# Where the sequences of an empty result begin. No text before can hold these bytes: JSON escapes its quotes, and in
# msgpack they are not UTF-8.
_JSON_START = b'"result":{"type":"result","sequences":['
_MSGPACK_START = b"\xa4type\xa6result\xa9sequences\x90"


class StoredResultBroken(Exception):
    """The rest of a result cannot be read. `frames` raises it."""


class StreamedJob(Response):
    """Send a job with the result that frames hold, of which the first has been read.

    If the others cannot be read, or if the client takes them too slowly, the reply ends without its last chunk, which
    every client reports. No more frames are read when the client has disconnected, and `frames` is closed.
    """

    def __init__(
        self,
        request: Request,
        job: wire.Job,
        num_sequences: int,
        first: bytes,
        frames: AsyncGenerator[bytes],
        held: HeldResults,
        reply_format: wire.Format,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={"Vary": "Accept", **headers}, media_type=MEDIA_TYPES[reply_format])
        del self.headers["Content-Length"]
        self._job, self._num_sequences, self._first, self._frames = job, num_sequences, first, frames
        self._request, self._held, self._format = request, held, reply_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await while_connected(self._request, self._send_body(send))
        except ClientDisconnect:
            return
        except (StoredResultBroken, Unavailable, wire.Invalid) as error:
            logger.error("the reply with a job is cut off: %s", error, extra={"job": self._job.id})
            return
        finally:
            await self._frames.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_body(self, send: Send) -> None:
        before, after = await self._held.run(self._around, is_large=len(self._first) > LARGE_BYTES)
        await send_body(send, before)
        num_sequences = 0
        async for frame in self._frames:
            is_large = self._format == "json" or len(frame) > LARGE_BYTES
            piece = await self._held.run(lambda frame=frame: self._sequences(frame), is_large=is_large)  # type: ignore[misc]
            await send_body(send, b"," + piece if num_sequences and self._format == "json" else piece)
            num_sequences += count_sequences(frame)
        if num_sequences != self._num_sequences:
            raise StoredResultBroken(f"it has {num_sequences} sequences instead of {self._num_sequences}")
        await send_body(send, after)

    def _around(self) -> tuple[bytes, bytes]:
        """Return the encoded job up to its result's sequences, and what follows on them."""
        job = replace(self._job, result=decode_head(self._first))
        if self._format == "json":
            before, start, after = wire.encode_json(job).partition(_JSON_START)
            return before + start, after
        before, start, after = wire.encode(job).partition(_MSGPACK_START)
        return before + start[:-1] + b"\xdd" + self._num_sequences.to_bytes(4, "big"), after

    def _sequences(self, frame: bytes) -> bytes:
        """Return a frame's sequences without brackets."""
        if self._format == "msgpack":
            return without_array_header(frame)
        return wire.encode_json(decode_sequences(frame))[1:-1]
