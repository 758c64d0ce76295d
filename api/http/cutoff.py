"""Requests that a stopping server gives up, such as an upload that takes long, are told so."""

import asyncio

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scorepool.api.http.errors import Unavailable, error_response


class ShutdownMiddleware:
    """ASGI middleware: what uvicorn cancels is answered with 503, not with 500 and a traceback in the log."""

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
            if scope["type"] != "http" or has_started:
                raise
            refusal = Unavailable("this server stops before the request could be answered; send it again")
            await error_response(Request(scope), refusal)(scope, receive, send)
