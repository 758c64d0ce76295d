"""Webhook endpoints, which receive an event for every job of their owner, and deliveries of events.

The `webhook` URL of a single job makes deliveries of the same kind, without an endpoint.
"""

from typing import Annotated, Literal, Self, get_args

from msgspec import UNSET, Meta, Struct, UnsetType, field
from msgspec.structs import replace

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
    """A new webhook endpoint."""

    url: Url
    events: Events = field(default_factory=lambda: list(ALL_EVENTS))
    description: Description = ""


class EndpointChange(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of an endpoint to change; absent fields keep their values. `disabled`: false enables it again."""

    url: Url | UnsetType = UNSET
    events: Events | UnsetType = UNSET
    description: Description | UnsetType = UNSET
    disabled: bool | UnsetType = UNSET


class WebhookEndpoint(Struct, frozen=True, kw_only=True):
    """A URL that receives an event for each job that ends after its registration. Times are in seconds since 1970."""

    id: str
    url: str
    events: list[EventType]
    description: str
    created_at: float
    disabled_at: float | None = None
    disabled_reason: str | None = None  # its owner disabled it, or what the receiver answered


class WebhookSecret(Struct, frozen=True, kw_only=True):
    """The secret of an endpoint, shown only in this reply.

    Until `previous_expires_at`, deliveries are also signed with the previous secret.
    """

    endpoint: WebhookEndpoint
    secret: str
    previous_expires_at: float | None = None


class WebhookEndpointList(Struct, frozen=True, kw_only=True):
    """All endpoints of an owner, oldest first."""

    endpoints: list[WebhookEndpoint]


class SigningSecret(Struct, frozen=True, kw_only=True):
    """A secret that signs the deliveries to an endpoint until `expires_at` (Unix time, s)."""

    secret: str  # whsec_...
    expires_at: float | None = None


class Subscriber(Struct, frozen=True, kw_only=True):
    """An endpoint as it is stored in Redis, in JSON. `store/lua/outbox.lua` reads it when a job ends."""

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
    """The endpoint to which `webhook.test` is sent."""

    endpoint_id: Annotated[str, Meta(min_length=1, max_length=64)]


class ReplayRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The failed deliveries to try again. Each one starts its schedule from the first attempt."""

    since: Annotated[float, Meta(ge=0, le=1e11, description="Only events from this time on, in seconds since 1970.")]
    endpoint_id: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


class ReplayReply(Struct, frozen=True, kw_only=True):
    """The number of deliveries that are tried again."""

    replayed: int


DeliveryState = Literal["pending", "delivered", "failed"]


class DeliveryAttempt(Struct, frozen=True, kw_only=True):
    """One POST. If no answer came, `status` is null and `error` says why."""

    at: float
    elapsed_ms: int
    status: int | None = None
    error: str | None = None


class Delivery(Struct, frozen=True, kw_only=True):
    """A delivery of one event. Every attempt sends `id` as its `webhook-id`. `url` has no query."""

    id: str
    state: DeliveryState
    event: EventType | Literal["webhook.test"]
    job_id: str | None
    batch_id: str | None = None
    endpoint_id: str | None
    url: str | None
    created_at: float | None
    next_attempt_at: float | None = None  # only while it waits for one
    reason: str | None = None  # why it failed
    attempts: list[DeliveryAttempt]  # latest last, at most 20; only the last one in a list of deliveries


class DeliveryPage(Struct, frozen=True, kw_only=True):
    """Deliveries, newest first. Pass `next_cursor` as `cursor` to get the next page; null: no more."""

    deliveries: list[Delivery]
    next_cursor: str | None = None
