"""Webhook events: the payloads of Standard Webhooks. They are small: the receiver fetches the result from `url`."""

from typing import Literal

from msgspec import Struct

from scorepool.wire.webhook import BatchEventType, JobEventType


class JobEventData(Struct, frozen=True, kw_only=True):
    """The job that ended."""

    id: str
    status: Literal["finished", "failed", "canceled"]
    model: str
    url: str  # of the job, including its result


class TestEventData(Struct, frozen=True, kw_only=True):
    """The endpoint that is tested."""

    endpoint_id: str


class BatchEventData(Struct, frozen=True, kw_only=True):
    """The batch that ended."""

    id: str


class BatchEvent(Struct, frozen=True, kw_only=True):
    """A batch ended. OpenAI's SDK reads this payload; `timestamp` is the field of Standard Webhooks."""

    id: str
    object: Literal["event"] = "event"
    created_at: int  # Unix time, s
    type: BatchEventType
    timestamp: str  # ISO 8601, UTC
    data: BatchEventData


class JobEvent(Struct, frozen=True, kw_only=True):
    """A job ended, or an endpoint is tested. Every attempt to deliver an event sends the same bytes."""

    type: JobEventType | Literal["webhook.test"]
    timestamp: str  # ISO 8601, UTC: when the job ended
    data: JobEventData | TestEventData
