"""Keep strangers off a server without keys: it serves programs of this machine, and its own pages.

Three kinds of requests are not from here, although they come in on loopback:

    another name        a page whose host name was rebound to 127.0.0.1: its Host header shows it
    another machine     what a proxy or a tunnel passes on: headers that only proxies send
    another page        what a page of another origin has the user's browser send: Origin, or Sec-Fetch-Site

`ssh -L` and programs of other users of this machine cannot be told from the user's own; see SECURITY.md.
"""

import re
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from scorepool.api.http.errors import Forbidden, error_response

# Headers by which a proxy, a load balancer, a tunnel or a CDN names the client that it serves.
PROXY_HEADERS = frozenset(
    {"forwarded", "via", "client-ip", "true-client-ip", "x-real-ip", "x-client-ip", "x-cluster-client-ip"}
    | {"x-remote-ip", "x-remote-addr", "x-originating-ip", "x-original-host", "x-original-url", "x-rewrite-url"}
    | {"x-host", "x-http-host-override", "x-proxyuser-ip", "wl-proxy-client-ip", "proxy-client-ip"}
    | {"fastly-client-ip", "fly-client-ip", "x-azure-clientip", "x-azure-socketip", "x-appengine-user-ip"}
)
PROXY_PREFIXES = ("x-forwarded", "x-original-forwarded", "x-envoy-", "x-arr-", "x-vercel-", "cf-", "tailscale-")
_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[0-9A-Za-z.-]+))(?::[0-9]{1,5})?")


class LoopbackOnly:
    """Refuse every request that shows that it does not come from this machine, on every route."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := refusal_of(scope)):
            message = f"this server has no API keys, so {refusal}; its operator sets SCOREPOOL_API_KEYS to open it"
            await error_response(Request(scope), Forbidden(message))(scope, receive, send)
            return
        await self._app(scope, receive, send)


def refusal_of(scope: Scope) -> str:
    """Say why a request is not served without keys; empty if it is."""
    headers = Headers(scope=scope)
    address, port = scope.get("server") or ("localhost", None)
    if port is not None and not is_loopback(address):  # no port: a unix socket. api/serve.py checks it at the start too
        return "it answers on loopback only"
    host = headers.get("host", "localhost")
    if not is_loopback_host(host):
        return "it answers on loopback only, as 127.0.0.1 or localhost"
    for name in headers:
        if (plain := name.replace("_", "-")) in PROXY_HEADERS or plain.startswith(PROXY_PREFIXES):
            return f"it serves no clients of a proxy, and the request has the header {name[:100]}"
    if is_cross_site(scope["method"], headers, host):
        return "it serves no pages of other origins (Origin, Sec-Fetch-Site)"
    return ""


def is_cross_site(method: str, headers: Headers, host: str) -> bool:
    """True if a page of another origin sends this request, also one of another port.

    Such a page may open a GET as a page of its own, as a link does. It gets no byte of it.
    """
    if any(origin.lower() not in _origins(host) for origin in headers.getlist("origin")):
        return True
    sites = headers.getlist("sec-fetch-site")
    if all(site in ("same-origin", "none") for site in sites):
        return False
    is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return not (is_link and method in ("GET", "HEAD"))


def _origins(host: str) -> tuple[str, ...]:
    """Return the spellings of this server's origin. TLS would need a proxy."""
    host = host.lower()
    return (f"http://{host}", f"http://{host.removesuffix(':80')}")


def is_loopback_host(header: str) -> bool:
    """True if a Host header names loopback."""
    match = _HOST.fullmatch(header)
    return match is not None and is_loopback(match["v6"] or match["name"].lower().rstrip("."))


def is_loopback(host: str) -> bool:
    """True if `host` is a loopback address or `localhost`. Other names do not count: they may resolve to anything."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
