"""Send one attempt of a delivery: a signed POST. No Redis, no queue, no second attempt.

Signatures follow Standard Webhooks 1.0.0: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec
"""

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime

import httpcore
from standardwebhooks import Webhook

from scorepool.store import Settings, WebhookUrl
from scorepool.store.ssrf_guard import MAX_RECEIVED_BYTES, SsrfGuard, resolve, tls_context
from scorepool.worker.rq.clock import REDIS_CLOCK, clock_s
from scorepool.worker.version import VERSION
from scorepool.worker.webhooks.connection_pool import Connection, ConnectionPool

MAX_RESPONSE_BYTES = 64 * 1024  # of a body
LOOKUPS_PER_DELIVERY = 4  # threads: the system's resolver may go on for long after the attempt has ended
MAX_RETRY_AFTER_S = 86_400
Headers = dict[bytes | str, bytes | str]
ResponseHead = tuple[int, list[tuple[bytes, bytes]]]  # status, headers


@dataclass(frozen=True, slots=True)
class Attempt:
    """The result of one attempt. If no answer came, `status` is None and `error` says why."""

    host: str
    elapsed_ms: int
    status: int | None = None
    error: str | None = None
    retry_after_s: int | None = None
    is_final: bool = False  # another attempt is useless or not wanted

    @property
    def is_delivered(self) -> bool:
        """True if the receiver answered with a 2xx status."""
        return self.status is not None and 200 <= self.status < 300

    def __str__(self) -> str:
        answer = self.error if self.status is None else f"HTTP {self.status}"
        return f"{self.host}: {answer} after {self.elapsed_ms} ms"


class Sender:
    """Sends attempts. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._allow_private = settings.webhook_allow_private
        self._timeout_s = settings.webhook_timeout_s
        self._tls = tls_context()
        self._connections = ConnectionPool()
        self._lookups = ThreadPoolExecutor(
            LOOKUPS_PER_DELIVERY * settings.webhook_max_in_flight, thread_name_prefix="lookup"
        )

    def send(self, url: str, message_id: str, body: bytes, secrets: Sequence[str]) -> Attempt:
        """POST once, signed with each of the secrets, of which there is at least one."""
        try:
            receiver = WebhookUrl.parse(url, self._allow_private)
        except ValueError as error:  # it was accepted under other settings
            return Attempt("refused", 0, error=str(error), is_final=True)
        started_at = time.monotonic()
        try:
            request_headers = self._headers(receiver, message_id, body, secrets)
            status, headers = self._post(receiver, started_at + self._timeout_s, body, request_headers)
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.RemoteProtocolError) as error:
            elapsed_ms = _elapsed_ms(started_at)
            return Attempt(receiver.host, elapsed_ms, error=f"{type(error).__name__}: {str(error)[:200]}")
        return Attempt(
            receiver.host,
            _elapsed_ms(started_at),
            status,
            retry_after_s=parse_retry_after(headers),
            is_final=status == 410,  # Gone: the receiver wants no more deliveries
        )

    def evict_idle_connections(self) -> None:
        """Close idle connections. Call it every connection_pool.IDLE_TIMEOUT_S."""
        self._connections.evict_idle()

    def close(self) -> None:
        """Close every idle connection, and stop looking up names."""
        self._lookups.shutdown(wait=False, cancel_futures=True)
        self._connections.close()

    def _post(self, receiver: WebhookUrl, deadline: float, body: bytes, headers: Headers) -> ResponseHead:
        connection = self._connections.acquire((receiver.scheme, receiver.host, receiver.port))
        if connection is not None:
            try:
                return self._exchange(connection, receiver, deadline, body, headers)
            except (httpcore.NetworkError, httpcore.RemoteProtocolError):
                pass  # the receiver closed it; if it read the message, it recognises the second one by its id
        return self._exchange(self._connect(receiver, deadline), receiver, deadline, body, headers)

    def _connect(self, receiver: WebhookUrl, deadline: float) -> Connection:
        guard = SsrfGuard(deadline, lambda host, port: self._lookups.submit(resolve, host, port), self._allow_private)
        origin = httpcore.Origin(receiver.scheme.encode(), receiver.host.encode(), receiver.port)
        http = httpcore.HTTPConnection(origin, ssl_context=self._tls, network_backend=guard)
        now = clock_s()
        return Connection((receiver.scheme, receiver.host, receiver.port), http, guard, opened_at=now, idle_since=now)

    def _exchange(
        self, connection: Connection, receiver: WebhookUrl, deadline: float, body: bytes, headers: Headers
    ) -> ResponseHead:
        """Send the request and read its response. A redirect is a response like any other."""
        connection.guard.deadline = deadline
        connection.guard.bytes_left = MAX_RECEIVED_BYTES
        url = httpcore.URL(scheme=receiver.scheme, host=receiver.host, port=receiver.port, target=receiver.target)
        try:
            with connection.http.stream("POST", url, headers=headers, content=body) as response:
                _drain(response)
                return response.status, response.headers
        finally:
            self._connections.release(connection)

    def _headers(self, receiver: WebhookUrl, message_id: str, body: bytes, secrets: Sequence[str]) -> Headers:
        now = REDIS_CLOCK.now()  # receivers refuse a time that is minutes off
        is_default_port = receiver.port == (443 if receiver.scheme == "https" else 80)
        host = f"[{receiver.host}]" if ":" in receiver.host else receiver.host
        return {
            "host": host if is_default_port else f"{host}:{receiver.port}",
            "content-type": "application/json",
            "content-length": str(len(body)),
            "user-agent": f"scorepool/{VERSION}",
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(Webhook(secret).sign(message_id, now, body.decode()) for secret in secrets),
        }


def parse_retry_after(headers: list[tuple[bytes, bytes]]) -> int | None:
    """Return the seconds of the `Retry-After` header, at most a day; None if it is absent or invalid."""
    value = next((value for name, value in headers if name.lower() == b"retry-after"), b"").decode("latin-1").strip()
    if value.isascii() and value.isdigit():
        return min(int(value[:9]), MAX_RETRY_AFTER_S)
    try:
        until = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None
    wait_s = (until.replace(tzinfo=until.tzinfo or UTC) - REDIS_CLOCK.now()).total_seconds()
    return min(max(0, round(wait_s)), MAX_RETRY_AFTER_S)


def _drain(response: httpcore.Response) -> None:
    """Read up to MAX_RESPONSE_BYTES of the body, so that a receiver with a normal response sees no reset."""
    num_bytes = 0
    # The status has arrived: an error in the body does not change the result.
    with contextlib.suppress(httpcore.NetworkError, httpcore.TimeoutException, httpcore.RemoteProtocolError):
        for chunk in response.iter_stream():
            num_bytes += len(chunk)
            if num_bytes >= MAX_RESPONSE_BYTES:
                return


def _elapsed_ms(started_at: float) -> int:
    return round((time.monotonic() - started_at) * 1000)
