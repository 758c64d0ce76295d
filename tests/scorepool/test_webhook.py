"""`scorepool.verify_webhook`: what a receiver accepts and what it refuses."""

import base64
import time
from datetime import UTC, datetime

import pytest
from standardwebhooks import Webhook

from scorepool import WebhookError, verify_webhook, wire

OLD, NEW, OTHER = ("whsec_" + base64.b64encode(bytes([fill]) * 32).decode() for fill in (1, 2, 3))
JOB = wire.JobEvent(
    type="job.finished",
    timestamp="2026-11-21T02:37:08Z",
    data=wire.JobEventData(id="1", status="finished", model="demo", url="https://a.example/v1/jobs/1"),
)
BATCH = wire.BatchEvent(
    id="evt_1", created_at=1, type="batch.completed", timestamp="t", data=wire.BatchEventData(id="batch_1")
)
TEST = wire.TestEvent(timestamp="t", data=wire.TestEventData(endpoint_id="e"))


def signed(body: bytes, *secrets: str, age_s: float = 0.0) -> dict[str, str]:
    """Return the headers that the library of Standard Webhooks makes."""
    now = datetime.fromtimestamp(time.time() - age_s, UTC)
    signatures = [Webhook(secret).sign("wh_1", now, body.decode()) for secret in secrets]
    stamp = str(int(now.timestamp()))
    return {"Webhook-Id": "wh_1", "Webhook-Timestamp": stamp, "Webhook-Signature": " ".join(signatures)}


@pytest.mark.parametrize("event", [JOB, BATCH, TEST])
def test_an_event_that_one_of_the_secrets_signed_is_returned(event: wire.JobEvent | wire.BatchEvent | wire.TestEvent):
    body = wire.encode_json(event)
    assert verify_webhook(body, signed(body, OLD), OLD) == event
    assert verify_webhook(body, signed(body, NEW, OLD), [OTHER, OLD]) == event


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"Webhook-Id": "wh_2"}, "none is by one of the secrets"),
        ({"Webhook-Signature": ""}, "none is by one of the secrets"),
        ({"Webhook-Signature": "v1,é v1a,x"}, "none is by one of the secrets"),
        ({"Webhook-Timestamp": "-1"}, "whole seconds"),
        ({"Webhook-Timestamp": "9" * 5000}, "whole seconds"),
        ({"Webhook-Timestamp": "1"}, "s old"),
    ],
)
def test_a_changed_header_is_refused(changes: dict[str, str], reason: str):
    body = wire.encode_json(JOB)
    with pytest.raises(WebhookError, match=reason):
        verify_webhook(body, signed(body, OLD) | changes, OLD)


def test_what_others_signed_is_refused():
    body = wire.encode_json(JOB)
    for headers in ({}, signed(body, OTHER), signed(body + b" ", OLD), signed(body, OLD, age_s=400)):
        with pytest.raises(WebhookError):
            verify_webhook(body, headers, [OLD, NEW])
    with pytest.raises(WebhookError, match="no event"):
        verify_webhook(b"{}", signed(b"{}", OLD), OLD)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_é", "whsec_" + base64.b64encode(b"short").decode()])
def test_a_malformed_secret_is_an_error_because_anybody_could_sign_with_it(secret: str):
    body = wire.encode_json(JOB)
    with pytest.raises(ValueError, match="malformed") as refusal:
        verify_webhook(body, signed(body, OLD), secret)
    assert not isinstance(refusal.value, WebhookError)
