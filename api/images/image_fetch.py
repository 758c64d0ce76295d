"""Fetch one image from where its URL says, through the guard of webhooks. Blocking: runs on a thread.

Everything ends by one deadline, from the lookup of the name on. At most `max_bytes` of a body are kept, whatever its
headers claim, and no content coding is undone. Redirects are followed, and each of them is checked like the first URL.
"""

import ssl
import time
from collections.abc import Callable
from urllib.parse import urljoin

import httpcore

from scorepool.store import ImageUrl
from scorepool.store.ssrf_guard import BlockedAddress, Lookup, SsrfGuard

MAX_REDIRECTS = 3
MAX_HEAD_BYTES = 64 * 1024  # beside the body
REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = [(b"accept", b"image/*"), (b"accept-encoding", b"identity"), (b"user-agent", b"scorepool")]


class FetchFailed(ValueError):
    """The image did not come. The text names the host, and no path or query."""


class FileTooLarge(FetchFailed):
    """The body has more bytes than an image may have."""


class ImageFetch:
    """One image on its way."""

    def __init__(
        self,
        url: str,
        parse: Callable[[str], ImageUrl],
        lookup: Lookup,
        tls: ssl.SSLContext,
        max_bytes: int,
        timeout_s: float,
        *,
        allow_private: bool,
    ) -> None:
        """Prepare it. `parse` checks the URL, and that of each redirect, and raises ValueError."""
        self._url, self._parse, self._lookup, self._tls = url, parse, lookup, tls
        self._max_bytes, self._timeout_s, self._allow_private = max_bytes, timeout_s, allow_private
        self._guard: SsrfGuard | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """End it soon: nobody waits for it. Any thread."""
        self._is_stopped = True
        if self._guard is not None:
            self._guard.deadline = 0.0

    def run(self) -> bytes:
        """Return the file. Raises FetchFailed."""
        deadline = time.monotonic() + self._timeout_s
        url = self._url
        for _ in range(1 + MAX_REDIRECTS):
            try:
                source = self._parse(url)
            except ValueError as error:
                redirected = "" if url == self._url else "a redirect is not followed: "
                raise FetchFailed(f"{redirected}{error}") from None
            file, location = self._get(source, deadline)
            if location is None:
                return file
            url = _joined(url, location)
        raise FetchFailed(f"expected an image at {source.host}, found more than {MAX_REDIRECTS} redirects")

    def _get(self, source: ImageUrl, deadline: float) -> tuple[bytes, str | None]:
        """Return the file, or where a redirect leads. Raises FetchFailed."""
        max_bytes = self._max_bytes + MAX_HEAD_BYTES
        self._guard = guard = SsrfGuard(deadline, self._lookup, self._allow_private, max_bytes)
        if self._is_stopped:
            guard.deadline = 0.0
        origin = httpcore.Origin(source.scheme.encode(), source.host.encode(), source.port)
        url = httpcore.URL(scheme=source.scheme, host=source.host, port=source.port, target=source.target)
        headers = [(b"host", _host_header(source)), *_HEADERS]
        try:
            with (
                httpcore.HTTPConnection(origin, ssl_context=self._tls, network_backend=guard) as http,
                http.stream("GET", url, headers=headers) as response,
            ):
                return self._read(source, response)
        except BlockedAddress:
            raise FetchFailed(f"the name {source.host} has an address that is not public; {source.allow}") from None
        except httpcore.TimeoutException:
            limit = f"{self._timeout_s:g} s (SCOREPOOL_FETCH_IMAGES_TIMEOUT_S)"
            raise FetchFailed(f"expected an image from {source.host} within {limit}") from None
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            raise FetchFailed(f"no image came from {source.host}: {str(error)[:200] or type(error).__name__}") from None

    def _read(self, source: ImageUrl, response: httpcore.Response) -> tuple[bytes, str | None]:
        headers = {name.lower(): value.decode("latin-1") for name, value in response.headers}
        if response.status in REDIRECTS and b"location" in headers:
            return b"", headers[b"location"]
        if response.status != 200:
            raise FetchFailed(f"expected an image at {source.host}, found HTTP status {response.status}")
        claimed = headers.get(b"content-length", "")
        if claimed.isdecimal() and int(claimed[:18]) > self._max_bytes:
            raise self._too_large(source)
        file = bytearray()
        for chunk in response.iter_stream():
            file += chunk
            if len(file) > self._max_bytes:
                raise self._too_large(source)
        return bytes(file), None

    def _too_large(self, source: ImageUrl) -> FileTooLarge:
        return FileTooLarge(f"found more at {source.host}")


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location).partition("#")[0]
    except ValueError:
        raise FetchFailed("expected an image, found a redirect to no URL") from None


def _host_header(source: ImageUrl) -> bytes:
    host = f"[{source.host}]" if ":" in source.host else source.host
    is_default_port = source.port == (443 if source.scheme == "https" else 80)
    return (host if is_default_port else f"{host}:{source.port}").encode()
