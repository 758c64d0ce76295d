"""Send calls to one API, and repeat them while it is away."""

import asyncio
import logging
import math
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import unquote

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception
from tenacity.wait import wait_random_exponential

from scorepool import wire
from scorepool.sdk.calls import MSGPACK, Call
from scorepool.sdk.errors import InvalidUrl, NotScorepool, ScorepoolError, Unreachable

T = TypeVar("T")
R = TypeVar("R")
logger = logging.getLogger("scorepool")
DEFAULT_URL = "http://127.0.0.1:8000"  # of `scorepool serve`
RETRY_S = 60.0  # for which a call is repeated: longer than a restart of the API takes on a busy machine
REPLY_TIMEOUT_S = 60.0  # added to the wait that the caller asked for
MIN_REPLY_TIMEOUT_S = 10.0  # of callers with less time: a busy API needs some seconds
CONNECT_TIMEOUT_S = 10.0
WARN_AT_ATTEMPT = 5  # after a few seconds
WARN_EVERY = 30  # attempts: about three minutes
WARN_PAUSE_S = 30.0  # between warnings of one connection: many calls wait for the same server
BUSY = 429  # nothing was done
UNKNOWN = frozenset({502, 503, 504})  # after which a request may have been done: Redis or a proxy's server is silent
NOTHING_DONE = "redis_full"  # the code of a reply whose status is in UNKNOWN, and that is sure
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_PAUSE = wait_random_exponential(multiplier=0.2, max=10.0)
UNIX = "unix://"


def url_and_key(url: str | None, api_key: str | None) -> tuple[str, str | None]:
    """Return what is given, or else SCOREPOOL_URL or the default, and SCOREPOOL_API_KEY. "" is no key."""
    if url is None:
        url = os.environ.get("SCOREPOOL_URL") or DEFAULT_URL
    if api_key is None:
        api_key = os.environ.get("SCOREPOOL_API_KEY")
    return url, api_key or None


class Event(NamedTuple):
    """A server-sent event."""

    name: str
    id: str
    data: bytes


class AsyncConnection:
    """The connections to one API. Belongs to one event loop."""

    def __init__(self, url: str, api_key: str | None, retry_s: float) -> None:
        """Use the API at a URL, or at a unix socket: `unix:///PATH`."""
        headers = {"Accept": MSGPACK, "Content-Type": MSGPACK}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ValueError("`api_key` has a character that no HTTP header can have: expected printable ASCII")
            headers["Authorization"] = f"Bearer {api_key}"
        self.url = url.rstrip("/").removesuffix("/v1")  # the OpenAI SDK's base_url works too
        self.retry_s = retry_s
        self.has_answered = False
        self._has_sent = False
        self._warned_at = -math.inf
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the first call
        limits = httpx.Limits(max_connections=None)  # who waits must not block who submits
        base_url, path = split_unix(self.url)
        transport = httpx.AsyncHTTPTransport(uds=path, limits=limits) if path else None
        try:
            parsed = httpx.URL(base_url)
            is_http = parsed.scheme in ("http", "https") and parsed.host and (parsed.port or 0) < 2**16
        except httpx.InvalidURL:
            is_http = False
        if not is_http:
            raise InvalidUrl(url)
        self.http = httpx.AsyncClient(base_url=base_url, headers=headers, limits=limits, transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self.http.aclose()

    async def send(self, call: Call[T], retry_s: float | None = None) -> T:
        """Send a call until it succeeds or is refused; repeat it for `retry_s` while the API is away or busy.

        Raises ScorepoolError, Unreachable, NotScorepool.
        """
        self._check_loop()
        retry_s = self.retry_s if retry_s is None else retry_s
        try:
            content = await self._retry(call, retry_s, lambda: self._send_once(call, _reply_timeout_s(retry_s)))
        except ScorepoolError as error:
            if not (call.method == "DELETE" and error.status == 404 and error.may_be_done):
                raise
            content = b""  # the attempt whose reply was lost has deleted it
        try:
            return call.decode(content)
        except wire.Invalid as error:
            raise NotScorepool(self.url, str(error), call.name, call.job_id) from error

    def _check_loop(self) -> None:
        """Raise RuntimeError after `close`, and in another event loop: the connections would never answer there."""
        if self.http.is_closed:
            raise RuntimeError("this client is closed: make a new one")
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise RuntimeError(
                "this AsyncClient was used in another event loop: make one in each, inside `asyncio.run`"
            )

    async def _retry(self, call: Call[Any], retry_s: float, attempt: Callable[[], Awaitable[R]]) -> R:
        started_at = asyncio.get_running_loop().time()
        may_be_done = False
        deadline = _Deadline(started_at + retry_s)
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: _may_retry(call, error)),
            wait=deadline.pause_s,
            stop=deadline.is_over,
            before_sleep=lambda state: self._log(state, call),
            reraise=True,
        )
        try:
            async for one in retrying:
                with one:
                    try:
                        return await attempt()
                    except httpx.TransportError as error:
                        may_be_done |= not isinstance(error, NOT_SENT)
                        raise
                    except ScorepoolError as error:
                        may_be_done |= error.status in UNKNOWN and error.code != NOTHING_DONE
                        error.may_be_done = may_be_done and call.method != "GET"
                        raise
        except httpx.TransportError as error:
            seconds = asyncio.get_running_loop().time() - started_at
            unreachable = Unreachable(self.url, seconds, error, call.name, call.job_id, may_be_done=may_be_done)
            raise unreachable from None  # it says what happened: the frames of libraries would bury it
        except ScorepoolError as error:
            raise error.with_traceback(None) from None
        raise AssertionError("unreachable: the last attempt returns or raises")

    @property
    def may_have_sent(self) -> bool:
        """False if no request can have reached the API so far."""
        return self.has_answered or self._has_sent

    def _extensions(self) -> dict[str, Any]:
        """Return what lets httpx tell when it begins to send the first request."""
        return {} if self.may_have_sent else {"trace": self._note}

    async def _note(self, event: str, _: dict[str, Any]) -> None:
        self._has_sent |= event.endswith(".send_request_headers.started")

    def _log(self, state: RetryCallState, call: Call[Any]) -> None:
        error = state.outcome.exception() if state.outcome else None
        is_due = state.attempt_number == WARN_AT_ATTEMPT or state.attempt_number % WARN_EVERY == 0
        now = asyncio.get_running_loop().time()
        if is_due := is_due and now - self._warned_at >= WARN_PAUSE_S:
            self._warned_at = now
        what = f" about job {call.job_id}" if call.job_id else ""
        message = "no answer from %s%s for %.0f s, still trying: %s: %s"
        seconds = state.seconds_since_start or 0.0
        level = logging.WARNING if is_due else logging.DEBUG
        logger.log(level, message, self.url, what, seconds, type(error).__name__, error)

    @asynccontextmanager
    async def stream(self, call: Call[Any], retry_s: float | None = None) -> AsyncGenerator[httpx.Response]:
        """Send a call whose reply is read while it arrives, by `events_of` or `lines_of`.

        Only the beginning is repeated, for `retry_s`, while the API is away. Raises ScorepoolError, Unreachable.
        """
        self._check_loop()
        retry_s = self.retry_s if retry_s is None else retry_s
        async with AsyncExitStack() as stack:
            yield await self._retry(call, retry_s, lambda: stack.enter_async_context(self._open_stream(call)))

    @asynccontextmanager
    async def _open_stream(self, call: Call[Any]) -> AsyncGenerator[httpx.Response]:
        timeout = httpx.Timeout(REPLY_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        async with self.http.stream(
            call.method,
            call.path,
            headers=call.headers,
            params=call.params or None,
            timeout=timeout,
            extensions=self._extensions(),
        ) as reply:
            if not reply.is_success:
                await reply.aread()
                raise refusal_of(reply, call.job_id)
            self.has_answered = True
            yield reply

    async def _send_once(self, call: Call[Any], reply_timeout_s: float) -> bytes:
        reply = await self.http.request(
            call.method,
            call.path,
            content=call.content,
            files={"file": (call.form.filename, call.form.file)} if call.form else None,
            data=call.form.fields if call.form else None,
            headers=call.headers,
            params=call.params or None,
            timeout=httpx.Timeout(reply_timeout_s + call.wait_s, connect=CONNECT_TIMEOUT_S),
            extensions=self._extensions(),
        )
        if not reply.is_success:
            raise refusal_of(reply, call.job_id)
        self.has_answered = True
        return reply.content


async def events_of(reply: httpx.Response) -> AsyncGenerator[Event]:
    """Yield the events of a stream until it ends or its connection is lost."""
    lines: dict[bytes, bytes] = {}
    with suppress(httpx.TransportError):
        async for group in lines_of(reply):
            for line in group:
                name, _, value = line.partition(b": ")
                if line and name:
                    lines[name] = value
                elif lines:
                    event, event_id, data = (lines.get(key, b"") for key in (b"event", b"id", b"data"))
                    yield Event(event.decode(), event_id.decode(), data)
                    lines = {}


async def lines_of(reply: httpx.Response) -> AsyncGenerator[list[bytes]]:
    """Yield the lines that end in each piece of a reply, and at last one without an end.

    Only line feeds end them: httpx's own lines also end at U+2028, which texts in JSON may contain. Raises
    httpx.TransportError if the reply is cut off.
    """
    begun: list[bytes] = []  # pieces of a line that has not ended: joined once, however many there are
    async for piece in reply.aiter_bytes():
        *ended, last = piece.split(b"\n")
        if ended:
            ended[0] = b"".join((*begun, ended[0]))
            begun = []
            yield ended
        begun.append(last)
    if any(begun):
        yield [b"".join(begun)]


def _reply_timeout_s(retry_s: float) -> float:
    """Return how long a silent API is awaited, beside the wait that the caller asked for."""
    return min(REPLY_TIMEOUT_S, max(retry_s, MIN_REPLY_TIMEOUT_S))


def split_unix(url: str) -> tuple[str, str | None]:
    """Return the base URL of the API at a URL, and the path of its unix socket if the URL is `unix:///PATH`."""
    if not url.startswith("unix:"):
        return url, None
    path = unquote(url.removeprefix(UNIX))
    if not path.startswith("/"):
        raise InvalidUrl(url)
    return "http://localhost", path


class _Deadline:
    """End attempts at a time of the event loop's clock; the last one begins then, unless the server asks for more."""

    def __init__(self, at: float) -> None:
        self._at = at

    def is_over(self, state: RetryCallState) -> bool:
        left_s = self._left_s()
        return left_s <= 0 or _asked_s(state) > left_s

    def pause_s(self, state: RetryCallState) -> float:
        """Return the seconds until the next attempt: what the server asks for, or a growing random time."""
        return max(_asked_s(state), min(_PAUSE(state), max(0.0, self._left_s())))

    def _left_s(self) -> float:
        return self._at - asyncio.get_running_loop().time()


def _may_retry(call: Call[Any], error: BaseException) -> bool:
    if isinstance(error, ScorepoolError):
        is_sure = error.status == BUSY or error.code == NOTHING_DONE
        return is_sure or (error.status in UNKNOWN and call.may_repeat)
    if isinstance(error, httpx.LocalProtocolError):  # again would be no better
        return False
    return isinstance(error, NOT_SENT) or (isinstance(error, httpx.TransportError) and call.may_repeat)


def _asked_s(state: RetryCallState) -> float:
    """Return for how many seconds the server asks to wait."""
    error = state.outcome.exception() if state.outcome else None
    return error.retry_after_s if isinstance(error, ScorepoolError) else 0.0


def refusal_of(reply: httpx.Response, job_id: str | None) -> ScorepoolError:
    """Decode the API's error, or build one from a reply that another server (a proxy) sent."""
    try:
        error = wire.parse(reply.content, wire.ErrorReply, "msgpack").error
    except wire.Invalid:
        target = f"it redirects to {reply.headers['Location']}: " if "Location" in reply.headers else ""
        message = f"HTTP {reply.status_code}: {target}{reply.text[:200]}"
        error = wire.ErrorBody(code="unknown", type="server_error", message=message)
    request = f"{reply.request.method} {reply.request.url}"
    return ScorepoolError(reply.status_code, error, request, job_id, _retry_after_s(reply))


def _retry_after_s(reply: httpx.Response) -> float:
    """Return the Retry-After header in seconds, 0 if it is missing or a date (which a proxy may send)."""
    seconds = reply.headers.get("Retry-After", "")
    return float(seconds) if seconds.isdecimal() and len(seconds) < 10 else 0.0
