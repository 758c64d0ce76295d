"""Write a reply as server-sent events. Knows no jobs."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from redis.exceptions import RedisError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from scorepool import wire
from scorepool.api.http.bodies import while_connected
from scorepool.api.http.error_forms import AnthropicErrorReply, AnyErrorReply
from scorepool.api.http.errors import ApiError, error_reply_to, internal_error, redis_unanswered, request_id
from scorepool.api.http.large_replies import send_body

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0  # of silence, after which a comment is sent: proxies close silent connections


class EventStream(Response):
    """Send messages as server-sent events, bytes unchanged.

    None says that there is nothing to send; after KEEP_ALIVE_S of silence it becomes a comment, which keeps the
    connection open. A client that reads slowly delays this stream and nothing else. `messages` is closed when the
    client disconnects. `to_error_event` writes the event of an error whose form differs from that of replies.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        request: Request,
        messages: AsyncGenerator[object | None],
        last: bytes,
        to_error_event: Callable[[AnyErrorReply], bytes | None] = lambda _: None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["Content-Length"]
        self._request = request
        self._messages = messages
        self._last = last
        self._to_error_event = to_error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await while_connected(self._request, self._send_events(send))
        except ClientDisconnect:
            return
        finally:
            await self._messages.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        """Send all messages. An error becomes the last event: it is too late for a status."""
        try:
            clock = asyncio.get_running_loop().time
            sent_at = clock()
            async for message in self._messages:
                if message is None and clock() - sent_at < 0.9 * KEEP_ALIVE_S:  # less than the pause between two Nones
                    continue
                await send_body(send, _encode(message))
                sent_at = clock()
        except ClientDisconnect:
            raise
        except ApiError as error:
            await send(self._error_event(error))
            return
        except RedisError as error:
            logger.error("%s: Redis failed during a stream of events: %s", request_id(self._request), error)
            await send(self._error_event(redis_unanswered()))
            return
        except Exception:
            logger.exception("%s: a stream of events ended early", request_id(self._request))
            await send(self._error_event(internal_error()))
            return
        await send(_body(self._last))

    def _error_event(self, error: ApiError) -> Message:
        body = error_reply_to(self._request, error)
        if (event := self._to_error_event(body)) is not None:
            return _body(event)
        name = b"event: error\n" if isinstance(body, AnthropicErrorReply) else b""
        return _body(name + encode_event(wire.encode_json(body)))


def _body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


def _encode(message: object | None) -> bytes:
    if message is None:
        return b": waiting\n\n"
    return message if isinstance(message, bytes) else encode_event(wire.encode_json(message))


def encode_event(data: bytes) -> bytes:
    """Encode an event without a name."""
    return b"data: " + data + b"\n\n"
