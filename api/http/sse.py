"""Jobs of a synchronous request whose tokens are sent on as they come, as server-sent events."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from redis.exceptions import RedisError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from scorepool import wire
from scorepool.api.http import tasks
from scorepool.api.http.bodies import while_connected
from scorepool.api.http.errors import ApiError, error_reply, told_as, unanswered
from scorepool.api.state import State
from scorepool.api.submission import cancel_all, enter, refusal_of, until_ended

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"  # the end of a stream of OpenAI's dialect
KEEP_ALIVE_S = 15.0  # of silence, after which a comment is sent: proxies close what is silent


async def events_of(
    parts: State, owner: str, messages: Sequence[wire.Request], ids: Sequence[str], to_param: Callable[[str], str]
) -> AsyncGenerator[wire.TokenDelta | wire.Job | None]:
    """First None, when the jobs are accepted; then their growths and, in the order in which they end, the jobs.

    None again after KEEP_ALIVE_S of silence. Whoever closes this early cancels what has not ended. Raises ApiError, of
    fields as `to_param` names them.
    """
    limit_s = parts.settings.max_wait_s
    events: asyncio.Queue[wire.TokenDelta | wire.Job | Exception] = asyncio.Queue()

    async def tell_end(id_: str) -> None:
        try:
            events.put_nowait(await until_ended(parts, owner, id_, limit_s))
        except Exception as error:  # raised below, where somebody hears it
            events.put_nowait(error)

    with (
        told_as(to_param),
        parts.waiting.listening(ids, events.put_nowait),
        parts.metrics.waiting.track_inprogress(),
    ):
        await enter(parts, owner, messages, None, len(ids) if len(ids) > 1 else None, ids, is_synchronous=True)
        waits = [asyncio.create_task(tell_end(id_)) for id_ in ids]
        num_left = len(ids)
        try:
            yield None
            while num_left:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        event = await events.get()
                except TimeoutError:
                    yield None
                    continue
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, wire.Job):
                    if event.result is None:
                        raise refusal_of(event, limit_s)
                    num_left -= 1
                yield event
        finally:
            if num_left:
                await asyncio.shield(cancel_all(parts, owner, ids))
            await tasks.end(waits)


class EventStream(Response):
    """Writes messages as server-sent events, bytes as they are; None is a comment that keeps the connection open.

    A client that reads slowly is waited for here, and nowhere else. One that goes away closes `messages`.
    """

    media_type = "text/event-stream"

    def __init__(self, request: Request, messages: AsyncGenerator[object | None], last: bytes) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["Content-Length"]
        self._request = request
        self._messages = messages
        self._last = last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await while_connected(self._request, self._write(send))
        except ClientDisconnect:
            return
        finally:
            await self._messages.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send) -> None:
        try:
            async for message in self._messages:
                await send({"type": "http.response.body", "body": _written(message), "more_body": True})
        except ApiError as error:  # too late for a status
            await send(_error(error))
            return
        except RedisError as error:
            logger.error("Redis refused a stream of events: %r", error)
            await send(_error(unanswered()))
            return
        except Exception:
            logger.exception("a stream of events ended early")
            await send(_error(ApiError("a fault of the server; the log of the API has the details")))
            return
        await send({"type": "http.response.body", "body": self._last, "more_body": True})


def _error(refused: ApiError) -> Message:
    return {"type": "http.response.body", "body": event(wire.encode_json(error_reply(refused))), "more_body": True}


def _written(message: object | None) -> bytes:
    if message is None:
        return b": waiting\n\n"
    return message if isinstance(message, bytes) else event(wire.encode_json(message))


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
