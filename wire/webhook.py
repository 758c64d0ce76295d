"""Webhooks as the API speaks of them: endpoints that are told of every job of an owner, and deliveries.

A per-job URL (`webhook` of a submission) makes deliveries of the same kind, without an endpoint.
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
    list[EventType], Meta(min_length=1, max_length=16, description="What it is told of; everything by default.")
]
Description = Annotated[str, Meta(max_length=200)]


class Registration(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A new endpoint."""

    url: Url
    events: Events = field(default_factory=lambda: list(ALL_EVENTS))
    description: Description = ""


class Change(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is not there stays as it is. `disabled`: false lets an endpoint be told again."""

    url: Url | UnsetType = UNSET
    events: Events | UnsetType = UNSET
    description: Description | UnsetType = UNSET
    disabled: bool | UnsetType = UNSET


class WebhookEndpoint(Struct, frozen=True, kw_only=True):
    """Told of jobs that end from its registration on. Times are seconds since 1970."""

    id: str
    url: str
    events: list[EventType]
    description: str
    created_at: float
    disabled_at: float | None = None
    disabled_reason: str | None = None  # "its owner" or what the receiver answered


class WebhookSecret(Struct, frozen=True, kw_only=True):
    """Shown this once. `previous_expires_at`: until then deliveries carry the old secret's signature as well."""

    endpoint: WebhookEndpoint
    secret: str
    previous_expires_at: float | None = None


class WebhookEndpoints(Struct, frozen=True, kw_only=True):
    endpoints: list[WebhookEndpoint]


class SigningSecret(Struct, frozen=True, kw_only=True):
    secret: str  # whsec_...
    expires_at: float | None = None


class Subscriber(Struct, frozen=True, kw_only=True):
    """An endpoint as it lies in Redis, in JSON: a script reads it when a job ends (outbox.lua)."""

    endpoint: WebhookEndpoint
    secrets: list[SigningSecret]  # the newest first

    def disabled(self, at: float, reason: str) -> Self:
        return replace(self, endpoint=replace(self.endpoint, disabled_at=at, disabled_reason=reason))

    def enabled(self) -> Self:
        return replace(self, endpoint=replace(self.endpoint, disabled_at=None, disabled_reason=None))

    def current_secrets(self, at: float) -> list[str]:
        return [one.secret for one in self.secrets if one.expires_at is None or one.expires_at > at]


class TestEvent(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Send `webhook.test` to one endpoint."""

    endpoint_id: Annotated[str, Meta(min_length=1, max_length=64)]


class Replay(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which failed deliveries are to be tried again, from the first attempt of their schedule on."""

    since: Annotated[float, Meta(ge=0, le=1e11, description="Events from this time on, in seconds since 1970.")]
    endpoint_id: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


class Replayed(Struct, frozen=True, kw_only=True):
    replayed: int


DeliveryState = Literal["pending", "delivered", "failed"]


class DeliveryAttempt(Struct, frozen=True, kw_only=True):
    """One POST. Without an answer `status` is null and `error` says why."""

    at: float
    elapsed_ms: int
    status: int | None = None
    error: str | None = None


class Delivery(Struct, frozen=True, kw_only=True):
    """`id` is the `webhook-id` of its every attempt. `url` comes without its query."""

    id: str
    state: DeliveryState
    event: EventType | Literal["webhook.test"]
    job_id: str | None
    batch_id: str | None = None
    endpoint_id: str | None
    url: str | None
    created_at: float | None
    next_attempt_at: float | None = None  # while it waits for one
    reason: str | None = None  # why it failed
    attempts: list[DeliveryAttempt]  # the latest last, at most 20; the last one alone in a list of deliveries


class DeliveryPage(Struct, frozen=True, kw_only=True):
    """Newest first. Pass `next_cursor` as `cursor` for the page that follows; null ends the list."""

    deliveries: list[Delivery]
    next_cursor: str | None = None
