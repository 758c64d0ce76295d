"""Redis as a typed room: names of keys, settings of the connection, scripts and their loader. Imports wire."""

from scorepool.store.keys import DELIVER, DONE, INFER, TOKENS, WEBHOOKS, Keys, queue_name, queue_names
from scorepool.store.outbox import DELIVERY_KEPT_S, OUTBOX
from scorepool.store.sentinel import SentinelUrl
from scorepool.store.settings import KEY_NAME, Settings, SettingsError, parse_model
from scorepool.store.webhook_url import WebhookUrl, is_public, literal_address

__all__ = [
    "DELIVER",
    "DELIVERY_KEPT_S",
    "DONE",
    "INFER",
    "KEY_NAME",
    "OUTBOX",
    "TOKENS",
    "WEBHOOKS",
    "Keys",
    "SentinelUrl",
    "Settings",
    "SettingsError",
    "WebhookUrl",
    "is_public",
    "literal_address",
    "parse_model",
    "queue_name",
    "queue_names",
]
