"""Wrap the whole application: request ids, HEAD, replies of a stopping server.

All are plain ASGI middleware. `app.py` decides their order.
"""

import asyncio
import re
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scorepool.api.http.error_forms import form_of
from scorepool.api.http.errors import error_response, server_stopping

REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")  # what is taken over from a client


class RequestId:
    """Answer every request with an `x-request-id`: the client's own if it is sane, else a new one.

    Must be the outermost middleware, so that every reply and every line of the log has the id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req_{uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if form_of(scope["path"]) == "anthropic":
                    headers["request-id"] = request_id  # the name that Anthropic's SDK reads
            await send(message)

        await self._app(scope, receive, send_with_id)


class HeadAsGet:
    """Answer HEAD like GET, without the body. All middleware inside this one sees a GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, send_without_body)


class ShutdownMiddleware:
    """Answer 503 to requests that uvicorn cancels when it stops, instead of 500 with a traceback in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def watch(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if has_started:  # uvicorn closes the connection, and says so in one line
                return
            await error_response(Request(scope), server_stopping())(scope, receive, send)
