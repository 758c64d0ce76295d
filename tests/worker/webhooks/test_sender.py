"""One attempt: the request that is sent, the meaning of each response, and the safety rules."""

import base64
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
import trustme
from standardwebhooks import Webhook, WebhookVerificationError

import scorepool.worker.webhooks.sender
from scorepool.store import Settings
from scorepool.worker.rq.clock import REDIS_CLOCK
from scorepool.worker.webhooks.sender import MAX_RESPONSE_BYTES, Sender, parse_retry_after
from tests.worker.receiver import Receiver, raw_server, receiver

OLD, NEW = ("whsec_" + base64.b64encode(bytes([fill]) * 24).decode() for fill in (1, 2))
BODY = b'{"type":"job.finished"}'


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender(Settings(webhook_allow_private=True, webhook_timeout_s=10))
    yield sender
    sender.close()


def test_the_receiver_verifies_a_delivery_with_either_secret(sender: Sender, hook: Receiver):
    attempt = sender.send(hook.url, "wh_1", BODY, [OLD, NEW])

    assert attempt.is_delivered
    assert attempt.status == 204
    [received] = hook.received
    assert received.path == "/hook?token=hush"
    assert received.body == BODY
    for secret in (OLD, NEW):
        assert Webhook(secret).verify(received.body, dict(received.headers)) == {"type": "job.finished"}
    stranger = "whsec_" + base64.b64encode(b"3" * 24).decode()
    with pytest.raises(WebhookVerificationError):
        Webhook(stranger).verify(received.body, dict(received.headers))


@pytest.mark.parametrize(
    "sent", [b"HTTP/1.1 103 Early Hints\r\n\r\n", b"HTTP/1.1 204 No Content\r\na: b\r\n", b"a: b\r\n"]
)
def test_a_receiver_that_sends_heads_without_end_is_cut_off(sender: Sender, sent: bytes):
    num_sent = 0

    def flood(connection: socket.socket) -> None:
        nonlocal num_sent
        connection.recv(65536)
        with suppress(OSError):
            while True:
                num_sent += connection.send(sent * 100)

    with raw_server(flood) as port:
        attempt = sender.send(f"http://127.0.0.1:{port}/", "wh_1", BODY, [OLD])
        assert attempt.status is None
        assert "took too long" not in (attempt.error or "")
    assert num_sent < 16 * 2**20  # most is in the buffers of the sockets


def test_the_headers_are_those_of_standard_webhooks(sender: Sender, hook: Receiver):
    sender.send(hook.url, "wh_1", BODY, [OLD, NEW])

    headers = {name.lower(): value for name, value in hook.received[0].headers.items()}
    assert headers["webhook-id"] == "wh_1"
    assert abs(int(headers["webhook-timestamp"]) - datetime.now(UTC).timestamp()) < 60
    assert [part.partition(",")[0] for part in headers["webhook-signature"].split(" ")] == ["v1", "v1"]
    assert headers["content-type"] == "application/json"
    assert headers["user-agent"].startswith("scorepool/")
    assert headers["host"] == f"127.0.0.1:{hook.port}"


def test_the_signature_matches_the_published_test_vector_of_standard_webhooks(
    hook: Receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(REDIS_CLOCK, "now", lambda: datetime.fromtimestamp(1614265330, UTC))
    sender = Sender(Settings(webhook_allow_private=True))
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    sender.send(hook.url, "msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', [secret])
    sender.close()

    assert hook.received[0].headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_only_2xx_is_delivered(sender: Sender, hook: Receiver, status: int):
    hook.answers = [(status, {})]
    assert sender.send(hook.url, "wh_1", BODY, [OLD]).is_delivered


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308, 400, 401, 404, 410, 429, 500, 503, 599])
def test_any_other_status_is_a_failure_and_no_redirect_is_followed(sender: Sender, hook: Receiver, status: int):
    with receiver() as elsewhere:
        hook.answers = [(status, {"location": elsewhere.url, "retry-after": "7"})]
        attempt = sender.send(hook.url, "wh_1", BODY, [OLD])

        assert not attempt.is_delivered
        assert attempt.status == status
        assert attempt.is_final == (status == 410)
        assert attempt.retry_after_s == 7
        assert len(hook.received) == 1
        assert elsewhere.received == []


def test_no_proxy_of_the_environment_is_used(sender: Sender, hook: Receiver, monkeypatch: pytest.MonkeyPatch):
    with receiver() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert sender.send(hook.url, "wh_1", BODY, [OLD]).is_delivered
        assert proxy.received == []


def test_a_private_receiver_is_refused_unless_the_operator_allows_it(hook: Receiver, monkeypatch: pytest.MonkeyPatch):
    strict = Sender(Settings())
    refused = strict.send(hook.url, "wh_1", BODY, [OLD])
    assert refused.is_final
    assert "https://" in str(refused)
    monkeypatch.setattr(scorepool.worker.webhooks.sender, "resolve", lambda host, port: ["127.0.0.1"])
    attempt = strict.send(f"https://hooks.example:{hook.port}/", "wh_1", BODY, [OLD])
    strict.close()

    assert attempt.status is None
    assert attempt.error is not None
    assert "not public" in attempt.error
    assert not attempt.is_final  # the addresses of a name may change
    assert hook.received == []


def test_a_refused_connection_is_a_failure_that_says_so(sender: Sender):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    attempt = sender.send(f"http://127.0.0.1:{port}/hook?token=hush", "wh_1", BODY, [OLD])
    assert attempt.status is None
    assert "Connection refused" in str(attempt)


def test_an_attempt_contains_neither_the_query_of_the_url_nor_the_secret(sender: Sender, hook: Receiver):
    hook.answers = [(500, {})]
    attempt = sender.send(hook.url, "wh_1", BODY, [OLD])
    assert "hush" not in str(attempt) + repr(attempt)
    assert OLD not in repr(attempt)


def test_an_attempt_to_a_silent_receiver_times_out():
    sender = Sender(Settings(webhook_allow_private=True, webhook_timeout_s=0.3))

    def listen(connection: socket.socket) -> None:
        while connection.recv(4096):
            pass

    with raw_server(listen) as port:
        attempt = sender.send(f"http://127.0.0.1:{port}/", "wh_1", BODY, [OLD])
    sender.close()
    assert attempt.status is None
    assert attempt.error is not None
    assert attempt.error.partition(":")[0].endswith("Timeout")
    assert attempt.elapsed_ms >= 300


def test_an_endless_response_is_cut_off_and_its_status_counts(sender: Sender):
    num_sent = 0

    def send_endless_response(connection: socket.socket) -> None:
        nonlocal num_sent
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n")
        while True:
            num_sent += connection.send(b"x" * 65536)

    with raw_server(send_endless_response) as port:
        assert sender.send(f"http://127.0.0.1:{port}/", "wh_1", BODY, [OLD]).is_delivered
    assert num_sent < 512 * MAX_RESPONSE_BYTES  # the size of the socket buffers, far less than a gigabyte


def test_a_response_that_is_not_http_is_a_failure(sender: Sender):
    def banner(connection: socket.socket) -> None:
        connection.sendall(b"220 mail.example ESMTP\r\n" * 20)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):  # a socket that is closed with unread bytes is reset
            pass

    with raw_server(banner) as port:
        attempt = sender.send(f"http://127.0.0.1:{port}/", "wh_1", BODY, [OLD])
    assert attempt.status is None
    assert attempt.error is not None
    assert attempt.error.startswith("RemoteProtocolError")


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
    """A certificate authority that the system trusts; hooks.example resolves to loopback."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", os.fspath(tmp_path / "ca.pem"))
    monkeypatch.setattr(scorepool.worker.webhooks.sender, "resolve", lambda host, port: ["127.0.0.1"])
    return authority


def server_tls(authority: trustme.CA, name: str) -> ssl.SSLContext:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(name).configure_cert(tls)
    return tls


def test_tls_and_the_host_header_name_the_host_of_the_url(authority: trustme.CA):
    sender = Sender(Settings(webhook_allow_private=True))
    with receiver(server_tls(authority, "hooks.example")) as hook:
        attempt = sender.send(f"https://Hooks.Example:{hook.port}/hook", "wh_1", BODY, [OLD])
    sender.close()

    assert attempt.error is None
    assert attempt.is_delivered
    assert hook.names == ["hooks.example"]
    assert {name.lower(): value for name, value in hook.received[0].headers.items()}["host"] == (
        f"hooks.example:{hook.port}"
    )


@pytest.mark.parametrize("fault", ["another name", "an unknown authority"])
def test_a_certificate_that_does_not_verify_is_a_failure(authority: trustme.CA, fault: str):
    sender = Sender(Settings(webhook_allow_private=True))
    tls = (
        server_tls(authority, "evil.example") if fault == "another name" else server_tls(trustme.CA(), "hooks.example")
    )
    with receiver(tls) as hook:
        attempt = sender.send(f"https://hooks.example:{hook.port}/hook", "wh_1", BODY, [OLD])
    sender.close()

    assert attempt.status is None
    assert "CERTIFICATE_VERIFY_FAILED" in str(attempt)
    assert hook.received == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", 0),
        ("120", 120),
        (" 30 ", 30),
        ("86400", 86_400),
        ("99999999999999999999", 86_400),
        ("-1", None),
        ("1.5", None),
        ("soon", None),
        ("", None),
        ("٣", None),
        ("Sat, 21 Nov 2020 10:00:00 GMT", 0),
        ("Sat, 21 Nov 2122 10:00:00 GMT", 86_400),
        ("Wed, 99 Nov 2026 99:99:99 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date_and_at_most_a_day(value: str, expected: int | None):
    assert parse_retry_after([(b"Retry-After", value.encode("utf-8"))]) == expected


def test_a_date_in_retry_after_is_converted_to_seconds_from_now():
    value = format_datetime(datetime.now(UTC) + timedelta(minutes=5), usegmt=True)
    wait_s = parse_retry_after([(b"retry-after", value.encode())])
    assert wait_s is not None
    assert 200 <= wait_s <= 301
