"""Verify webhooks in a receiver: the signature of Standard Webhooks 1.0.0, in any of several secrets, and its time.

Any library of Standard Webhooks does the same; this one needs no other package than the SDK and returns typed events.
"""

import base64
import hmac
import re
import time
from collections.abc import Mapping, Sequence

from scorepool import wire

TOLERANCE_S = 300.0  # by which the time of an event may differ from the receiver's clock
Event = wire.JobEvent | wire.BatchEvent | wire.TestEvent
_EVENTS: tuple[type[Event], ...] = (wire.JobEvent, wire.BatchEvent, wire.TestEvent)


class WebhookError(ValueError):
    """A request that is no event for the owner of the secrets. Answer it with 400."""


def verify_webhook(body: bytes, headers: Mapping[str, str], secrets: str | Sequence[str]) -> Event:
    """Return the event of a POST if one of the secrets (`whsec_...`) signed it; raise WebhookError.

    Raises ValueError if a secret is malformed: anybody could sign with an empty one.

    `body` are the bytes as they came, before any parsing. Names of `headers` may be in any case. Give the old and the
    new secret while a secret is rotated. An event may come more than once, each time with the same `webhook-id`.
    """
    if not isinstance(body, bytes):
        raise TypeError(f"`body` is a {type(body).__name__}: expected the bytes of the request, as they came")
    if not isinstance(secrets, str | list | tuple) or secrets in ([], ()):
        raise TypeError(
            "`secrets` must be a secret (whsec_...) or a list of some: the `secret` of what the API returned"
        )
    given = {name.lower(): value for name, value in headers.items()}
    try:
        message_id, sent_at, signatures = (given[f"webhook-{name}"] for name in ("id", "timestamp", "signature"))
    except KeyError as error:
        raise WebhookError(f"the request has no header {error}") from None
    if not re.fullmatch(r"[0-9]{1,12}", sent_at):
        raise WebhookError("webhook-timestamp: expected whole seconds since 1970")
    age_s = time.time() - int(sent_at)
    if abs(age_s) > TOLERANCE_S:
        raise WebhookError(f"webhook-timestamp: {age_s:.0f} s old; expected at most {TOLERANCE_S:.0f} s")
    signed = b".".join((message_id.encode(errors="replace"), sent_at.encode(), body))
    expected = [_sign(secret, signed) for secret in ([secrets] if isinstance(secrets, str) else secrets)]
    found = [
        each.removeprefix("v1,").encode(errors="replace") for each in signatures.split(" ") if each.startswith("v1,")
    ]
    if not any(hmac.compare_digest(one, other) for one in expected for other in found):
        raise WebhookError("webhook-signature: none is by one of the secrets")
    return _decode(body)


def _sign(secret: str, signed: bytes) -> bytes:
    encoded = secret.removeprefix("whsec_")
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except ValueError:  # binascii.Error is one
        key = b""
    if not 24 <= len(key) <= 64:
        raise ValueError("a webhook secret is malformed: expected whsec_ and the base64 of 24 to 64 bytes")
    return base64.b64encode(hmac.digest(key, signed, "sha256"))


def _decode(body: bytes) -> Event:
    for event_type in _EVENTS:
        try:
            return wire.parse(body, event_type)
        except wire.Invalid:
            continue
    raise WebhookError("the body is no event that this version knows")
