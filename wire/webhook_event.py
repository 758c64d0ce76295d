"""Define webhook events: payloads of Standard Webhooks. They are small: the receiver fetches the result from `url`."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from scorepool.wire.webhook import BatchEventType, JobEventType

Timestamp = Annotated[str, Meta(description="ISO 8601, UTC: when the job or the batch ended, or the test was sent.")]


class JobEventData(Struct, frozen=True, kw_only=True):
    """Name the job that ended."""

    id: str
    status: Literal["finished", "failed", "canceled"]
    model: str
    url: Annotated[str, Meta(description="URL of the job with its result.")]


class TestEventData(Struct, frozen=True, kw_only=True):
    """Name the endpoint that is tested."""

    endpoint_id: str


class BatchEventData(Struct, frozen=True, kw_only=True):
    """Name the batch that ended."""

    id: str


class BatchEvent(Struct, frozen=True, kw_only=True):
    """Report that a batch ended. OpenAI's SDK reads this payload; `timestamp` is the field of Standard Webhooks."""

    id: str
    object: Literal["event"] = "event"
    created_at: Annotated[int, Meta(description="Unix time, in seconds.")]
    type: BatchEventType
    timestamp: Timestamp
    data: BatchEventData


class JobEvent(Struct, frozen=True, kw_only=True):
    """Report that a job ended. Every attempt to deliver an event sends the same bytes."""

    type: JobEventType
    timestamp: Timestamp
    data: JobEventData


class TestEvent(Struct, frozen=True, kw_only=True):
    """Test an endpoint, on request of its owner."""

    type: Literal["webhook.test"] = "webhook.test"
    timestamp: Timestamp
    data: TestEventData
