"""The secrets that sign the webhooks of an owner's jobs. Their rotation is read from Redis when a delivery is due."""

from redis import Redis

from scorepool.store import Keys, decode_webhook_secrets, webhook_secrets
from scorepool.wire import Invalid, SecretRotation, parse
from scorepool.worker.rq.clock import REDIS_CLOCK, clock_s

CACHE_TTL_S = 1.0
MAX_CACHED = 10_000


class OwnerSecrets:
    """A short-lived cache of secrets. Raises SettingsError if the operator's secrets are invalid."""

    def __init__(self, connection: Redis, operator_secrets: str) -> None:
        decode_webhook_secrets(operator_secrets)
        self._connection = connection
        self._operator_secrets = operator_secrets
        self._cache: dict[str, tuple[float, list[str]]] = {}

    def get(self, owner: str) -> list[str]:
        """Return the secrets of an owner, the one in force first."""
        read_at, secrets = self._cache.get(owner, (float("-inf"), []))
        if clock_s() - read_at > CACHE_TTL_S:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            rotation = _decode(self._connection.get(Keys.webhook_secret(owner)))
            secrets = webhook_secrets(self._operator_secrets, owner, rotation, REDIS_CLOCK.now_s())
            self._cache[owner] = (clock_s(), secrets)
        return secrets


def _decode(value: object) -> SecretRotation | None:
    """Decode a rotation. Data in Redis is untrusted: a value that cannot be decoded counts as missing."""
    if not isinstance(value, bytes):
        return None
    try:
        return parse(value, SecretRotation)
    except Invalid:
        return None
