"""Print the secret that signs the webhooks of a name's jobs: `python -m scorepool.worker.webhooks.show_secret NAME`."""

import sys

from scorepool.store import Settings
from scorepool.worker.rq.connection import Redis
from scorepool.worker.rq.redis_errors import exit_with_message
from scorepool.worker.webhooks.owner_secrets import OwnerSecrets


def main() -> None:
    """Print the secret in force, or end with a sentence."""
    with exit_with_message():
        settings = Settings.load()
        with Redis.from_url(settings.redis_url) as connection:
            print(OwnerSecrets(connection, settings.webhook_secret).get(sys.argv[1])[0])  # noqa: T201


if __name__ == "__main__":
    main()
