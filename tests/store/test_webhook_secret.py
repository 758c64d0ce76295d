"""The secrets that sign webhooks of jobs: the operator's, and what is derived from it for each name."""

import base64
import hashlib
import hmac

import pytest

from scorepool.store import LOCAL_OWNER, SettingsError, decode_webhook_secrets, webhook_secrets
from scorepool.wire import SecretRotation

OLD, NEW = ("whsec_" + base64.b64encode(bytes([fill]) * 24).decode() for fill in (1, 2))
ROTATION = SecretRotation(salt="b", previous_salt="a", previous_expires_at=100.0)


def derived(fill: int, owner: str, salt: str) -> str:
    message = b"scorepool: webhook secret of a name\0" + owner.encode() + b"\0" + salt.encode()
    return "whsec_" + base64.b64encode(hmac.new(bytes([fill]) * 24, message, hashlib.sha256).digest()).decode()


def test_the_secret_of_a_name_depends_on_the_operators_secret_the_name_and_the_salt():
    """The expected values are those of every release: another derivation would break every receiver."""
    assert webhook_secrets(OLD, "alice", None, 0.0) == [derived(1, "alice", "")]
    assert webhook_secrets(OLD, "bob", None, 0.0) == [derived(1, "bob", "")]
    assert webhook_secrets(NEW, "alice", None, 0.0) == [derived(2, "alice", "")]
    assert webhook_secrets(OLD, "alice", ROTATION, 100.0) == [derived(1, "alice", "b")]


def test_while_secrets_are_rotated_the_one_in_force_is_first_and_all_sign():
    secrets = webhook_secrets(f"{NEW} {OLD}", "alice", ROTATION, 99.0)
    assert secrets == [derived(fill, "alice", salt) for salt in ("b", "a") for fill in (2, 1)]


def test_without_keys_the_operators_secrets_sign_themselves():
    assert webhook_secrets(f"{NEW} {OLD.rstrip('=')}", LOCAL_OWNER, ROTATION, 0.0) == [NEW, OLD]


@pytest.mark.parametrize(
    "secrets",
    [
        "",
        "   ",
        "whsec_",
        "hush",
        "whsec_" + base64.b64encode(b"x" * 23).decode(),
        "whsec_" + base64.b64encode(b"x" * 65).decode(),
        base64.b64encode(b"x" * 32).decode(),
        "whsec_" + "é" * 32,
        "whsec_" + "*" * 32,
        f"{OLD} hush",
    ],
)
def test_an_invalid_secret_is_a_settings_error_that_does_not_contain_it(secrets: str):
    with pytest.raises(SettingsError, match="SCOREPOOL_WEBHOOK_SECRET") as refusal:
        decode_webhook_secrets(secrets)
    assert "hush" not in str(refusal.value)


@pytest.mark.parametrize("size", [24, 32, 64])
def test_secrets_of_24_to_64_bytes_are_accepted_padded_or_not(size: int):
    secret = "whsec_" + base64.b64encode(b"x" * size).decode()
    assert len(decode_webhook_secrets(f"{secret} {secret.rstrip('=')}")) == 2
