"""Define webhook endpoints, which receive an event for every job of their owner, and deliveries of events.

The `webhook` URL of a single job makes deliveries of the same kind, without an endpoint.
"""

from typing import Annotated, Literal, Self, get_args

from msgspec import UNSET, Meta, Struct, UnsetType, field
from msgspec.structs import replace

from scorepool.wire.reply import NextCursor

JobEventType = Literal["job.finished", "job.failed", "job.canceled"]
BatchEventType = Literal["batch.completed", "batch.failed", "batch.expired", "batch.cancelled"]  # OpenAI's spelling
BatchEnd = Literal["completed", "failed", "expired", "cancelled"]
EventType = JobEventType | BatchEventType
ALL_EVENTS: tuple[EventType, ...] = (*get_args(JobEventType), *get_args(BatchEventType))
Url = Annotated[str, Meta(min_length=1, max_length=2048, description="https, to a public host.")]
Events = Annotated[
    list[EventType], Meta(min_length=1, max_length=16, description="The events that it receives. Default: all.")
]
Description = Annotated[str, Meta(max_length=200)]


class EndpointRegistration(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Register a webhook endpoint."""

    url: Url
    events: Events = field(default_factory=lambda: list(ALL_EVENTS))
    description: Description = ""


class EndpointChange(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Change the given fields of an endpoint. `disabled`: false enables it again."""

    url: Url | UnsetType = UNSET
    events: Events | UnsetType = UNSET
    description: Description | UnsetType = UNSET
    disabled: bool | UnsetType = UNSET


class WebhookEndpoint(Struct, frozen=True, kw_only=True):
    """Show an endpoint: a URL that receives an event for each job that ends after its registration.

    Times are in seconds since 1970.
    """

    id: str
    url: str
    events: list[EventType]
    description: str
    created_at: float
    disabled_at: float | None = None
    disabled_reason: Annotated[
        str | None, Meta(description="`its owner disabled it`, or the answer of the receiver.")
    ] = None


class WebhookSecret(Struct, frozen=True, kw_only=True):
    """Show the secret of an endpoint. No other reply does."""

    endpoint: WebhookEndpoint
    secret: Annotated[str, Meta(description="`whsec_` and base64, as Standard Webhooks has it.")]
    previous_expires_at: Annotated[
        float | None,
        Meta(description="Unix time, in seconds, until which deliveries are signed with the previous secret as well."),
    ] = None


class JobWebhookSecret(Struct, frozen=True, kw_only=True):
    """Show the secret that signs the events that your jobs send to the URL in their field `webhook`."""

    secret: Annotated[str, Meta(description="`whsec_` and base64, as Standard Webhooks has it.")]
    previous_expires_at: Annotated[
        float | None,
        Meta(description="Unix time, in seconds, until which deliveries are signed with the previous secret as well."),
    ] = None


class WebhookEndpointList(Struct, frozen=True, kw_only=True):
    """List all endpoints of an owner, oldest first."""

    endpoints: list[WebhookEndpoint]


class SigningSecret(Struct, frozen=True, kw_only=True):
    """Hold a secret that signs the deliveries to an endpoint until `expires_at` (Unix time, s)."""

    secret: str  # whsec_...
    expires_at: float | None = None


class SecretRotation(Struct, frozen=True, kw_only=True):
    """Store in Redis, in JSON, from which salts the secrets of an owner are derived (store/webhook_secret.py)."""

    salt: str
    previous_salt: str
    previous_expires_at: float  # Unix time, s

    def valid_salts(self, at: float) -> list[str]:
        """Return the salts whose secrets sign at a time, the one in force first."""
        return [self.salt, *([self.previous_salt] if self.previous_expires_at > at else [])]


class Subscriber(Struct, frozen=True, kw_only=True):
    """Store an endpoint in Redis, in JSON. `store/lua/outbox.lua` reads it when a job ends."""

    endpoint: WebhookEndpoint
    secrets: list[SigningSecret]  # newest first

    def as_disabled(self, at: float, reason: str) -> Self:
        """Return a copy with the endpoint disabled."""
        return replace(self, endpoint=replace(self.endpoint, disabled_at=at, disabled_reason=reason))

    def as_enabled(self) -> Self:
        """Return a copy with the endpoint enabled."""
        return replace(self, endpoint=replace(self.endpoint, disabled_at=None, disabled_reason=None))

    def valid_secrets(self, at: float) -> list[str]:
        """Return the secrets that have not expired at a time."""
        return [each.secret for each in self.secrets if each.expires_at is None or each.expires_at > at]


class TestEventRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Send the event `webhook.test` to an endpoint."""

    endpoint_id: Annotated[str, Meta(min_length=1, max_length=64)]


class ReplayRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Try failed deliveries again. Each one starts its schedule from the first attempt."""

    since: Annotated[float, Meta(ge=0, le=1e11, description="Only events from this time on, in seconds since 1970.")]
    endpoint_id: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


class ReplayReply(Struct, frozen=True, kw_only=True):
    """Count the deliveries that are tried again."""

    replayed: int


DeliveryState = Literal["pending", "delivered", "failed"]


class DeliveryAttempt(Struct, frozen=True, kw_only=True):
    """Report one POST to a receiver."""

    at: Annotated[float, Meta(description="Unix time, in seconds.")]
    elapsed_ms: int
    status: Annotated[int | None, Meta(description="HTTP status of the answer. null: none came.")] = None
    error: Annotated[str | None, Meta(description="Reason why no answer came.")] = None


class Delivery(Struct, frozen=True, kw_only=True):
    """Show the delivery of one event to one receiver. Times are in seconds since 1970."""

    id: Annotated[str, Meta(description="Every attempt sends it as its `webhook-id`.")]
    state: DeliveryState
    event: EventType | Literal["webhook.test"]
    job_id: str | None
    batch_id: str | None = None
    endpoint_id: Annotated[str | None, Meta(description="The registered receiver. null: the job named its `url`.")]
    url: Annotated[str | None, Meta(description="The receiver that the job named, without its query.")]
    created_at: float | None
    next_attempt_at: Annotated[float | None, Meta(description="Set while it waits for an attempt.")] = None
    reason: Annotated[str | None, Meta(description="Reason why it failed.")] = None
    attempts: Annotated[
        list[DeliveryAttempt],
        Meta(description="The latest 20, the last one last. A list of deliveries shows only the last one."),
    ]


class DeliveryPage(Struct, frozen=True, kw_only=True):
    """List deliveries, newest first."""

    deliveries: list[Delivery]
    next_cursor: NextCursor = None
