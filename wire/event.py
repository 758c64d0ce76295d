"""What a webhook is told: a Standard Webhooks payload, thin on purpose. The result is fetched from `url`."""

from typing import Literal

from msgspec import Struct

from scorepool.wire.webhook import BatchEventType, JobEventType


class EventData(Struct, frozen=True, kw_only=True):
    id: str
    status: Literal["finished", "failed", "canceled"]
    model: str
    url: str  # of the job, result included


class TestData(Struct, frozen=True, kw_only=True):
    endpoint_id: str


class BatchData(Struct, frozen=True, kw_only=True):
    id: str


class BatchEvent(Struct, frozen=True, kw_only=True):
    """A batch ended: what OpenAI's SDK unwraps, with the time as Standard Webhooks has it beside OpenAI's."""

    id: str
    object: Literal["event"] = "event"
    created_at: int  # unix, s
    type: BatchEventType
    timestamp: str  # ISO 8601, UTC
    data: BatchData


class Event(Struct, frozen=True, kw_only=True):
    """One job ended, or somebody tests an endpoint. One event is the same bytes, however often it is sent."""

    type: JobEventType | Literal["webhook.test"]
    timestamp: str  # ISO 8601, UTC: when the job ended
    data: EventData | TestData
