"""The record of a delivery: the event, its receiver and the attempts so far. Stored in the hash of its RQ job.

`store/lua/outbox.lua` writes the record; `DeliveryRecord.fields_after` updates it with each attempt.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Self, get_args

from rq.utils import as_text

from scorepool.store import JobField, Settings
from scorepool.wire import (
    BatchEvent,
    BatchEventData,
    BatchEventType,
    DeliveryAttempt,
    JobEvent,
    JobEventData,
    TestEvent,
    TestEventData,
    encode_json,
    parse,
)
from scorepool.worker.rq.job import Job

MAX_ATTEMPTS_KEPT = 20

_STATUS: dict[str, Literal["finished", "failed", "canceled"]] = {
    "job.finished": "finished",
    "job.failed": "failed",
    "job.canceled": "canceled",
}
_BATCH_EVENTS = get_args(BatchEventType)
_TEXT_FIELDS = (
    *(JobField.OWNER, JobField.ENDPOINT, JobField.URL, JobField.EVENT),
    *(JobField.MODEL, JobField.EVENT_AT, JobField.JOB, JobField.BATCH),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRecord:
    """One delivery. It goes to a registered endpoint, or to `url` if `endpoint_id` is None."""

    delivery_id: str  # sent as `webhook-id`
    owner: str
    endpoint_id: str | None
    url: str
    event: str
    model: str
    ended_at: str  # ISO 8601: when the job ended
    job_id: str
    batch_id: str
    scheduled_from: float  # Unix time, s: the schedule of attempts began
    num_attempts: int  # those that count in the schedule
    attempts: list[DeliveryAttempt]  # the latest MAX_ATTEMPTS_KEPT

    @classmethod
    def from_job(cls, job: Job) -> Self:
        """Read the record; raise ValueError (wire.Invalid is one) if it is not what this version writes."""
        text = {name: as_text(value) for name, value in job.fields.items() if name in _TEXT_FIELDS}
        if text.get(JobField.EVENT) not in (*_STATUS, *_BATCH_EVENTS, "webhook.test"):
            raise ValueError(f"unknown event {text.get('event', '')[:80]!r}")
        return cls(
            delivery_id=job.id,
            owner=text.get(JobField.OWNER, ""),
            endpoint_id=text.get(JobField.ENDPOINT),
            url=text.get(JobField.URL, ""),
            event=text[JobField.EVENT],
            model=text.get(JobField.MODEL, ""),
            ended_at=text.get(JobField.EVENT_AT, ""),
            job_id=text.get(JobField.JOB, ""),
            batch_id=text.get(JobField.BATCH, ""),
            scheduled_from=float(job.fields.get(JobField.SCHEDULED_FROM, b"0")),
            num_attempts=int(job.fields.get(JobField.NUM_ATTEMPTS, b"0")),
            attempts=parse(job.fields.get(JobField.ATTEMPTS, b"[]"), list[DeliveryAttempt]),
        )

    def payload(self, settings: Settings) -> bytes:
        """Return the body of the POST: the same bytes at every attempt."""
        if self.event in _BATCH_EVENTS:
            return self._batch_payload()
        if self.event == "webhook.test":
            test = TestEventData(endpoint_id=self.endpoint_id or "")
            return encode_json(TestEvent(timestamp=self.ended_at, data=test))
        url = settings.job_url(self.job_id)
        job = JobEventData(id=self.job_id, status=_STATUS[self.event], model=self.model, url=url)
        return encode_json(JobEvent(type=self.event, timestamp=self.ended_at, data=job))  # type: ignore[arg-type]

    def _batch_payload(self) -> bytes:
        return encode_json(
            BatchEvent(
                id=f"evt_{self.batch_id.removeprefix('batch_')}",
                created_at=int(datetime.fromisoformat(self.ended_at).timestamp()),
                type=self.event,  # type: ignore[arg-type]
                timestamp=self.ended_at,
                data=BatchEventData(id=self.batch_id),
            )
        )

    def fields_after(self, attempt: DeliveryAttempt) -> Mapping[str, str]:
        """Return the hash fields that change with one more attempt."""
        attempts = [*self.attempts, attempt][-MAX_ATTEMPTS_KEPT:]
        return {
            JobField.NUM_ATTEMPTS: str(self.num_attempts + 1),
            JobField.ATTEMPTS: encode_json(attempts).decode(),
            JobField.REASON: "",
        }
