"""A server without API keys is for its own machine alone."""

from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from scorepool.api.http.errors import Forbidden, error_response


def is_loopback(host: str) -> bool:
    """A name counts only as `localhost`: what others resolve to may change."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class LoopbackOnly:
    """ASGI middleware: refuses requests that came in on another address, or under another name.

    The first is for servers started around `api.serve`. The second is for browsers: a page whose host name was rebound
    to 127.0.0.1 reaches this server as its own origin, but its Host header gives it away.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_local(scope):
            refusal = Forbidden(
                "this server has no API keys, so it answers on loopback only, as 127.0.0.1 or localhost; "
                "its operator sets SCOREPOOL_API_KEYS to open it"
            )
            await error_response(Request(scope), refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    @staticmethod
    def _is_local(scope: Scope) -> bool:
        address, port = scope.get("server") or ("localhost", None)
        if port is not None and not is_loopback(address):  # without port it is a unix socket
            return False
        host = Headers(scope=scope).get("host", "localhost")
        name = host[1 : host.find("]")] if host.startswith("[") else host.rpartition(":")[0] or host
        return is_loopback(name.lower().rstrip("."))
