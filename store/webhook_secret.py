"""The secrets that sign the webhooks of jobs (the field `webhook` of a request): one for each name of an API key.

They are derived from the operator's secret, so that no tenant can sign or verify an event of another, and so that Redis
holds none of them:

    HMAC-SHA256(operator's secret, a constant, name, salt)

The salt is empty until the name's secret is first rotated; then it is random and lies in Redis (wire.SecretRotation).
The jobs of a server without keys belong to LOCAL_OWNER, whose webhooks the operator's secret signs itself. No
webhook-id begins with the constant, so no signature by the operator's secret is a derived secret.
"""

import base64
import hmac

from scorepool.store.settings import LOCAL_OWNER, SettingsError
from scorepool.wire import SecretRotation

PREFIX = "whsec_"  # as Standard Webhooks has it
_EXPECTED = "a secret is whsec_ and the base64 of 24 to 64 bytes"
_PURPOSE = b"scorepool: webhook secret of a name"


def decode_webhook_secrets(secrets: str) -> list[bytes]:
    """Return the bytes of SCOREPOOL_WEBHOOK_SECRET's secrets. Raises SettingsError, which never contains a secret."""
    found = secrets.split()
    if not found:
        raise SettingsError(f"SCOREPOOL_WEBHOOK_SECRET is not set: webhooks are signed with it; {_EXPECTED}")
    decoded = []
    for number, secret in enumerate(found, 1):
        encoded = secret.removeprefix(PREFIX)
        try:
            key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
        except ValueError:  # binascii.Error is one
            key = b""
        if encoded == secret or not 24 <= len(key) <= 64:
            raise SettingsError(f"SCOREPOOL_WEBHOOK_SECRET: secret {number} of {len(found)} is invalid: {_EXPECTED}")
        decoded.append(key)
    return decoded


def encode_webhook_secret(key: bytes) -> str:
    """Return a secret as Standard Webhooks spells it."""
    return PREFIX + base64.b64encode(key).decode()


def webhook_secrets(operator_secrets: str, owner: str, rotation: SecretRotation | None, now_s: float) -> list[str]:
    """Return the secrets that sign the webhooks of an owner's jobs, the one in force first. Raises SettingsError.

    There are several while the operator's secret or the owner's is rotated.
    """
    keys = decode_webhook_secrets(operator_secrets)
    if owner == LOCAL_OWNER:
        return [encode_webhook_secret(key) for key in keys]
    salts = rotation.valid_salts(now_s) if rotation else [""]
    return [encode_webhook_secret(_derive(key, owner, salt)) for salt in salts for key in keys]


def _derive(key: bytes, owner: str, salt: str) -> bytes:
    return hmac.digest(key, b"\0".join((_PURPOSE, owner.encode(), salt.encode())), "sha256")
