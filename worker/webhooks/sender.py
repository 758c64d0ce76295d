"""One attempt to tell one webhook: a signed POST, and what came back. No Redis, no queue, no second attempt.

Signed as Standard Webhooks 1.0.0 has it: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec
"""

import base64
import contextlib
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import certifi
import httpcore
from standardwebhooks import Webhook

from scorepool.store import Settings, SettingsError, WebhookUrl
from scorepool.worker.version import VERSION
from scorepool.worker.webhooks.connection_pool import Connection, Connections
from scorepool.worker.webhooks.ssrf_guard import SsrfGuard, addresses

MAX_ANSWER_BYTES = 64 * 1024
MAX_RETRY_AFTER_S = 86_400
Headers = dict[bytes | str, bytes | str]
Answer = tuple[int, list[tuple[bytes, bytes]]]  # status, headers
_EXPECTED = "a secret is whsec_ and the base64 of 24 to 64 bytes"


@dataclass(frozen=True, slots=True)
class Attempt:
    """`status` is of the answer; without one it is None and `error` says why."""

    host: str
    elapsed_ms: int
    status: int | None = None
    error: str | None = None
    retry_after_s: int | None = None
    is_final: bool = False  # another attempt would be no better, or is not wanted

    @property
    def is_delivered(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    def __str__(self) -> str:
        answer = self.error if self.status is None else f"HTTP {self.status}"
        return f"{self.host}: {answer} after {self.elapsed_ms} ms"


class Sender:
    """Thread-safe. Raises SettingsError for secrets that are not what receivers' libraries read."""

    def __init__(self, settings: Settings) -> None:
        self._signers = signers(settings.webhook_secret)
        self._allow_private = settings.webhook_allow_private
        self._timeout_s = settings.webhook_timeout_s
        self._tls = tls_context()
        self._connections = Connections()
        self._lookups = ThreadPoolExecutor(settings.webhook_max_in_flight, thread_name_prefix="lookup")

    def send(self, url: str, message_id: str, body: bytes, signers: Sequence[Webhook] = ()) -> Attempt:
        """POST once, signed by `signers`, or else with the operator's secrets."""
        try:
            endpoint = WebhookUrl.parse(url, self._allow_private)
        except ValueError as error:  # it was taken when the operator allowed more
            return Attempt("refused", 0, error=str(error), is_final=True)
        started_at = time.monotonic()
        try:
            sent = self._headers(endpoint, message_id, body, signers or self._signers)
            status, headers = self._post(endpoint, started_at + self._timeout_s, body, sent)
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.RemoteProtocolError) as error:
            elapsed_ms = _ms_since(started_at)
            return Attempt(endpoint.host, elapsed_ms, error=f"{type(error).__name__}: {str(error)[:200]}")
        return Attempt(
            endpoint.host,
            _ms_since(started_at),
            status,
            retry_after_s=retry_after_s(headers),
            is_final=status == 410,  # Gone: the receiver asks to be left alone
        )

    def tidy(self) -> None:
        """Due every connections.IDLE_S."""
        self._connections.tidy()

    def close(self) -> None:
        self._lookups.shutdown(wait=False, cancel_futures=True)
        self._connections.close()

    def _post(self, endpoint: WebhookUrl, deadline: float, body: bytes, headers: Headers) -> Answer:
        connection = self._connections.take((endpoint.scheme, endpoint.host, endpoint.port))
        if connection is not None:
            try:
                return self._exchange(connection, endpoint, deadline, body, headers)
            except (httpcore.NetworkError, httpcore.RemoteProtocolError):
                pass  # the receiver hung up meanwhile; should it have had the message, it has its id, too
        return self._exchange(self._connect(endpoint, deadline), endpoint, deadline, body, headers)

    def _connect(self, endpoint: WebhookUrl, deadline: float) -> Connection:
        guard = SsrfGuard(deadline, lambda host, port: self._lookups.submit(addresses, host, port), self._allow_private)
        origin = httpcore.Origin(endpoint.scheme.encode(), endpoint.host.encode(), endpoint.port)
        http = httpcore.HTTPConnection(origin, ssl_context=self._tls, network_backend=guard)
        now = time.monotonic()
        return Connection((endpoint.scheme, endpoint.host, endpoint.port), http, guard, opened_at=now, idle_since=now)

    def _exchange(
        self, connection: Connection, endpoint: WebhookUrl, deadline: float, body: bytes, headers: Headers
    ) -> Answer:
        """A redirect is an answer like any other."""
        connection.guard.deadline = deadline
        url = httpcore.URL(scheme=endpoint.scheme, host=endpoint.host, port=endpoint.port, target=endpoint.target)
        try:
            with connection.http.stream("POST", url, headers=headers, content=body) as response:
                _drain(response)
                return response.status, response.headers
        finally:
            self._connections.give(connection)

    def _headers(self, endpoint: WebhookUrl, message_id: str, body: bytes, signers: Sequence[Webhook]) -> Headers:
        now = datetime.now(UTC)
        is_default_port = endpoint.port == (443 if endpoint.scheme == "https" else 80)
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        return {
            "host": host if is_default_port else f"{host}:{endpoint.port}",
            "content-type": "application/json",
            "content-length": str(len(body)),
            "user-agent": f"scorepool/{VERSION}",
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(signer.sign(message_id, now, body.decode()) for signer in signers),
        }


def signers(secrets: str) -> list[Webhook]:
    """One for each secret, so that a receiver may hold the old or the new one while they are rotated.

    Raises SettingsError, which does not repeat the secret.
    """
    found = secrets.split()
    if not found:
        raise SettingsError(f"SCOREPOOL_WEBHOOK_SECRET is not set: webhooks are signed with it; {_EXPECTED}")
    for number, secret in enumerate(found, 1):
        written = secret.removeprefix("whsec_")
        try:
            size = len(base64.b64decode(written + "=" * (-len(written) % 4), validate=True))
        except ValueError:  # binascii.Error among them
            size = 0
        if written == secret or not 24 <= size <= 64:
            raise SettingsError(f"SCOREPOOL_WEBHOOK_SECRET: secret {number} of {len(found)} is not one: {_EXPECTED}")
    return [Webhook(secret) for secret in found]


def tls_context() -> ssl.SSLContext:
    """Trusts the system's store (SSL_CERT_FILE names another), and certifi's where the system has none."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def retry_after_s(headers: list[tuple[bytes, bytes]]) -> int | None:
    """Seconds that the receiver asks to be left in peace, at most a day; None if it says nothing readable."""
    value = next((value for name, value in headers if name.lower() == b"retry-after"), b"").decode("latin-1").strip()
    if value.isascii() and value.isdigit():
        return min(int(value[:9]), MAX_RETRY_AFTER_S)
    try:
        until = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None
    wait_s = (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(0, round(wait_s)), MAX_RETRY_AFTER_S)


def _drain(response: httpcore.Response) -> None:
    """Read what a well-behaved receiver answers, so that it sees no reset; a long answer is cut off."""
    num_bytes = 0
    # The status has arrived and stands, whatever becomes of the body.
    with contextlib.suppress(httpcore.NetworkError, httpcore.TimeoutException, httpcore.RemoteProtocolError):
        for chunk in response.iter_stream():
            num_bytes += len(chunk)
            if num_bytes >= MAX_ANSWER_BYTES:
                return


def _ms_since(started_at: float) -> int:
    return round((time.monotonic() - started_at) * 1000)
