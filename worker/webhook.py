"""The job function wire.DELIVER: tell a job's webhook that it ended, and try again for three days.

    rq worker -w worker.WebhookWorker webhooks --with-scheduler

A delivery is an RQ job of its own, released in the transaction that ends the job it tells of. RQ keeps its retries: a
failed attempt returns `Again`, which RQ records as the attempt's result, and RQ's scheduler brings the delivery back,
so a killed worker forgets nothing. The worst that a kill does is a second POST of the same bytes, with the same
webhook-id.
"""

import logging
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from redis import Redis
from rq.job import Retry
from rq.utils import as_text

from wire import DELIVER, Event, EventData, Settings, encode_json
from worker.delivery import MAX_RETRY_AFTER_S, Attempt, Sender
from worker.flight import Pending
from worker.job import Job
from worker.worker import Worker

# Standard Webhooks' schedule: ten attempts, the last about 75 hours after the first.
SCHEDULE_S = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
JITTER = 0.2  # of each wait, on top, so that a receiver that comes back is not met by all at once

_ENDED: dict[str, Literal["finished", "failed", "canceled"]] = {  # RQ's word: ours
    "finished": "finished",
    "failed": "failed",
    "canceled": "canceled",
    "stopped": "canceled",
}

log = logging.getLogger("rq.worker.webhook")  # below RQ's own, which has the handlers


class Undeliverable(Exception):
    """This webhook will not be told any more, unless somebody requeues the delivery."""


class Again(Retry, dict[str, Any]):
    """Try again in so many seconds. Also a dict, because RQ keeps an attempt's return value as JSON."""

    def __init__(self, report: dict[str, Any], interval_s: int) -> None:
        dict.__init__(self, report)
        Retry.__init__(self, max=len(SCHEDULE_S), interval=interval_s)


class Deliver:
    """Callable from the main thread; each delivery runs on a thread of its own, so a slow receiver holds up no other.

    Raises SettingsError where the secrets are not right.
    """

    def __init__(self, settings: Settings, connection: Redis) -> None:
        self._settings = settings
        self._connection = connection
        self._sender = Sender(settings)
        self._threads = ThreadPoolExecutor(settings.webhook_max_in_flight, thread_name_prefix="delivery")

    def __call__(self, job: Job) -> Pending:
        future = self._threads.submit(self._attempt, job.id, job.kwargs["job_id"])
        return Pending(future, finish=lambda attempt: self._finish(job, attempt), cancel=future.cancel)

    def close(self) -> None:
        self._sender.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _attempt(self, delivery_id: str, job_id: str) -> Attempt | str:
        """What came of it; a str says why there is nothing to deliver."""
        names = ("status", "model", "ended_at", "webhook")
        values = self._connection.hmget(f"rq:job:{job_id}", names)  # of the job that ended, not of the delivery
        status, model, ended_at, url = (as_text(value) if value else "" for value in values)
        if not status or not url:
            return "the job was deleted, or its time is over"
        if status not in _ENDED:
            return "the job runs again; its next end will be delivered"
        body = payload(job_id, _ENDED[status], model, ended_at, self._settings.job_url(job_id))
        return self._sender.send(url, delivery_id, body)

    def _finish(self, job: Job, attempt: Attempt | str) -> dict[str, Any]:
        """What RQ records: the delivery is done, or to be tried again, or (Undeliverable) has failed for good."""
        if isinstance(attempt, str):
            log.info("%s: not delivered: %s", job.id, attempt)
            return {"delivered": False, "reason": attempt}
        number = (job.number_of_retries or 0) + 1
        report = {
            "delivered": attempt.is_delivered,
            "attempt": number,
            "status": attempt.status,
            "error": attempt.error,
            "elapsed_ms": attempt.elapsed_ms,
        }
        if attempt.is_delivered:
            log.info("%s: delivered to %s", job.id, attempt)
            return report
        if attempt.is_final or number > len(SCHEDULE_S):
            job.retries_left = 0
            why = "not to be tried again" if attempt.is_final else f"given up after {number} attempts"
            raise Undeliverable(f"{why}: {attempt}")
        interval_s = wait_s(number, attempt.retry_after_s)
        log.warning("%s: attempt %d failed, the next in %d s: %s", job.id, number, interval_s, attempt)
        return Again(report | {"retry_in_s": interval_s}, interval_s)


def payload(
    job_id: str, status: Literal["finished", "failed", "canceled"], model: str, ended_at: str, url: str
) -> bytes:
    """The same bytes for the same job, at every attempt."""
    data = EventData(id=job_id, status=status, model=model, url=url)
    return encode_json(Event(type=f"job.{status}", timestamp=ended_at, data=data))  # type: ignore[arg-type]


def wait_s(number: int, retry_after_s: int | None) -> int:
    """Seconds from the failed attempt `number` (1 is the first) to the next: at least what the receiver asks for."""
    scheduled_s = SCHEDULE_S[number - 1] * random.uniform(1, 1 + JITTER)  # noqa: S311 - no secret
    return round(max(scheduled_s, min(retry_after_s or 0, MAX_RETRY_AFTER_S)))


class WebhookWorker(Worker):
    """Serves the queue of deliveries. It has no engine: no worker that has one ever waits for a receiver."""

    deliver: Deliver | None = None

    @property
    def capacity(self) -> int:
        return self.settings.webhook_max_in_flight

    def open(self) -> None:
        """Raises SettingsError."""
        self.deliver = Deliver(self.settings, self.connection)
        self.functions[DELIVER] = self.deliver

    def close(self) -> None:
        if self.deliver is not None:
            self.deliver.close()
