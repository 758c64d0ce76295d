"""A delivery's own record: what is told to whom, and what came of it so far.

The fields of its RQ job (store/lua/outbox.lua).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Self, get_args

from rq.utils import as_text

from scorepool.store import Settings
from scorepool.wire import (
    BatchEvent,
    BatchEventData,
    BatchEventType,
    DeliveryAttempt,
    JobEvent,
    JobEventData,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRecord:
    id: str  # of the delivery; the webhook-id
    owner: str
    endpoint: str | None  # an endpoint's id, or else `url`
    url: str
    event: str
    model: str
    at: str  # ISO: when the job ended
    job: str
    batch: str
    since: float  # unix, s: the schedule began
    tries: int  # attempts that count in the schedule
    attempts: list[DeliveryAttempt]

    @classmethod
    def of(cls, job: Job) -> Self:
        """Raises ValueError, wire.Invalid among them, for a record that this version does not write."""
        text = {name: as_text(value) for name, value in job.fields.items() if name in _TEXTS}
        if text.get("event") not in (*_STATUS, *_BATCH_EVENTS, "webhook.test"):
            raise ValueError(f"no event is called {text.get('event', '')[:80]!r}")
        return cls(
            id=job.id,
            owner=text.get("owner", ""),
            endpoint=text.get("endpoint"),
            url=text.get("url", ""),
            event=text["event"],
            model=text.get("model", ""),
            at=text.get("at", ""),
            job=text.get("job", ""),
            batch=text.get("batch", ""),
            since=float(job.fields.get("since", b"0")),
            tries=int(job.fields.get("tries", b"0")),
            attempts=parse(job.fields.get("attempts", b"[]"), list[DeliveryAttempt]),
        )

    def body(self, settings: Settings) -> bytes:
        """The same bytes at every attempt."""
        if self.event in _BATCH_EVENTS:
            return self._batch_body()
        data: JobEventData | TestEventData
        if self.event == "webhook.test":
            data = TestEventData(endpoint_id=self.endpoint or "")
        else:
            data = JobEventData(
                id=self.job, status=_STATUS[self.event], model=self.model, url=settings.job_url(self.job)
            )
        return encode_json(JobEvent(type=self.event, timestamp=self.at, data=data))  # type: ignore[arg-type]

    def _batch_body(self) -> bytes:
        return encode_json(
            BatchEvent(
                id=f"evt_{self.batch.removeprefix('batch_')}",
                created_at=int(datetime.fromisoformat(self.at).timestamp()),
                type=self.event,  # type: ignore[arg-type]
                timestamp=self.at,
                data=BatchEventData(id=self.batch),
            )
        )

    def after(self, attempt: DeliveryAttempt) -> Mapping[str, str]:
        """The fields that change with one more attempt."""
        attempts: list[Any] = [*self.attempts, attempt][-MAX_ATTEMPTS_KEPT:]
        return {"tries": str(self.tries + 1), "attempts": encode_json(attempts).decode(), "reason": ""}


_TEXTS = ("owner", "endpoint", "url", "event", "model", "at", "job", "batch")
