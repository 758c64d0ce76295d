"""What a webhook is told: a Standard Webhooks payload, thin on purpose. The result is fetched from `url`."""

from typing import Literal

from msgspec import Struct


class EventData(Struct, frozen=True, kw_only=True):
    id: str
    status: Literal["finished", "failed", "canceled"]
    model: str
    url: str  # of the job, result included


class TestData(Struct, frozen=True, kw_only=True):
    endpoint_id: str


class Event(Struct, frozen=True, kw_only=True):
    """One job ended, or somebody tests an endpoint. One event is the same bytes, however often it is sent."""

    type: Literal["job.finished", "job.failed", "job.canceled", "webhook.test"]
    timestamp: str  # ISO 8601, UTC: when the job ended
    data: EventData | TestData
