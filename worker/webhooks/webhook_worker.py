"""The worker of the webhooks queue, and its job function store.DELIVER: deliver one event, with retries for three days.

    rq worker -w scorepool.worker.WebhookWorker --connection-class scorepool.worker.Redis --with-scheduler webhooks

A delivery is an RQ job of its own. The transaction that ends the inference job creates it, with everything that its
attempts need (delivery_record.py). RQ keeps the retries: a failed attempt returns `RetryLater`, RQ records it as the
result of the attempt, and RQ's scheduler queues the delivery again. A killed worker therefore loses no delivery; at
worst the receiver gets a second POST of the same bytes with the same webhook-id.
"""

import logging
import math
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from redis import Redis
from rq.job import Retry
from rq.utils import as_text

from scorepool.store import DELIVER, JobField, Settings, WebhookUrl
from scorepool.store.traces import Tracer
from scorepool.wire import DeliveryAttempt
from scorepool.worker.machine.periodic_tasks import PeriodicTask
from scorepool.worker.rq.clock import REDIS_CLOCK
from scorepool.worker.rq.in_flight import AsyncResult
from scorepool.worker.rq.job import Job
from scorepool.worker.rq.worker import Worker
from scorepool.worker.webhooks.connection_pool import IDLE_TIMEOUT_S
from scorepool.worker.webhooks.delivery_record import DeliveryRecord
from scorepool.worker.webhooks.owner_secrets import OwnerSecrets
from scorepool.worker.webhooks.receiver_limiter import ReceiverLimiter
from scorepool.worker.webhooks.sender import MAX_RETRY_AFTER_S, Attempt, Sender
from scorepool.worker.webhooks.subscribers import Subscribers

# Delays between the ten attempts of Standard Webhooks' schedule; the last is about 75 hours after the first.
RETRY_DELAYS_S = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
JITTER = 0.2  # largest random share added to each delay, so that retries do not reach a receiver all at once
MAX_DELIVERY_AGE_S = 4 * 86_400  # since the first attempt was due; ends a delivery that is postponed again and again
GONE = 410

log = logging.getLogger(__name__)


class Undeliverable(Exception):
    """The delivery has failed and is not tried again, unless it is replayed."""


class RetryLater(Retry, dict[str, Any]):
    """Try the delivery again after a delay. Also a dict, because RQ stores an attempt's return value as JSON."""

    def __init__(self, report: dict[str, Any], delay_s: int) -> None:
        dict.__init__(self, report)
        Retry.__init__(self, max=10**6, interval=delay_s)  # no limit of RQ's: it would count postponements too


class Deliverer:
    """The job function DELIVER, called on the main thread. Each delivery runs on a thread of its own, so that a slow
    receiver delays no other.

    Raises SettingsError if the operator's secrets are invalid.
    """

    def __init__(self, settings: Settings, connection: Redis, tracer: Tracer | None = None) -> None:
        self._settings = settings
        self._tracer = tracer
        self._sender = Sender(settings)
        self._limiter = ReceiverLimiter(settings.webhook_max_in_flight)
        self._subscribers = Subscribers(connection)
        self._owner_secrets = OwnerSecrets(connection, settings.webhook_secret)
        self._threads = ThreadPoolExecutor(settings.webhook_max_in_flight, thread_name_prefix="delivery")

    def __call__(self, job: Job) -> AsyncResult | RetryLater:
        """Start an attempt, or postpone it; raise Undeliverable if there is no receiver any more."""
        try:
            record = DeliveryRecord.from_job(job)
        except ValueError as error:
            raise self._give_up(job, f"its record cannot be read: {error}") from None
        subscriber = self._subscribers.get(record.owner, record.endpoint_id) if record.endpoint_id else None
        if record.endpoint_id and subscriber is None:
            raise self._give_up(job, "its endpoint was deleted")
        if subscriber and subscriber.endpoint.disabled_at is not None:
            raise self._give_up(job, f"its endpoint is disabled: {subscriber.endpoint.disabled_reason}")
        url = subscriber.endpoint.url if subscriber else record.url
        receiver = self._receiver(url)
        secrets = subscriber.valid_secrets(REDIS_CLOCK.now_s()) if subscriber else self._owner_secrets.get(record.owner)
        if not secrets:
            raise self._give_up(job, "its endpoint has no secret that is valid")
        wait_s = self._limiter.acquire(record.owner, receiver)
        if wait_s:
            return self._postpone(job, record, wait_s)
        future = self._threads.submit(self._attempt, record, url, secrets)
        future.add_done_callback(partial(self._release, record.owner, receiver, time.monotonic()))
        return AsyncResult(future, finish=lambda attempt: self._finish(job, record, attempt), cancel=future.cancel)

    def evict_idle_connections(self) -> None:
        """Close idle connections. Call it every connection_pool.IDLE_TIMEOUT_S."""
        self._sender.evict_idle_connections()

    def close(self) -> None:
        """Cancel the deliveries that have not started, and close the connections."""
        self._sender.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _receiver(self, url: str) -> str:
        """Return the host and port, the same for every spelling of them."""
        try:
            parsed = WebhookUrl.parse(url, self._settings.webhook_allow_private)
        except ValueError:  # it was accepted under other settings: the attempt will say so
            return ""
        return f"{parsed.host}:{parsed.port}"

    def _attempt(self, record: DeliveryRecord, url: str, secrets: Sequence[str]) -> Attempt:
        attempt = self._sender.send(url, record.delivery_id, record.payload(self._settings), secrets)
        if record.endpoint_id and attempt.status == GONE:
            self._subscribers.disable(record.owner, record.endpoint_id, url, "the receiver answered HTTP 410, Gone")
        return attempt

    def _release(self, owner: str, receiver: str, started_at: float, future: "Future[Attempt]") -> None:
        is_answered = not future.cancelled() and future.exception() is None and future.result().status is not None
        self._limiter.release(owner, receiver, time.monotonic() - started_at, is_answered)

    def _finish(self, job: Job, record: DeliveryRecord, attempt: Attempt) -> dict[str, Any]:
        """Return what RQ records: a report, or RetryLater; raise Undeliverable if the delivery has failed for good."""
        number = record.num_attempts + 1
        recorded = DeliveryAttempt(
            at=round(REDIS_CLOCK.now_s() - attempt.elapsed_ms / 1000, 3),
            elapsed_ms=attempt.elapsed_ms,
            status=attempt.status,
            error=attempt.error,
        )
        report = {
            "delivered": attempt.is_delivered,
            "attempt": number,
            "status": attempt.status,
            "error": attempt.error,
            "elapsed_ms": attempt.elapsed_ms,
        }
        job.extra_fields = record.fields_after(recorded)
        if self._tracer is not None:
            trace_attempt(self._tracer, job, record, number, recorded, attempt.host)
        if attempt.is_delivered:
            log.info("delivered to %s", attempt, extra={"job": job.id})
            return report
        if attempt.is_final or number > len(RETRY_DELAYS_S):
            why = "not to be tried again" if attempt.is_final else f"given up after {number} attempts"
            raise self._give_up(job, f"{why}: {attempt}")
        delay_s = retry_delay_s(number, attempt.retry_after_s)
        log.warning("attempt %d failed, the next in %d s: %s", number, delay_s, attempt, extra={"job": job.id})
        return RetryLater(report | {"retry_in_s": delay_s}, delay_s)

    def _postpone(self, job: Job, record: DeliveryRecord, wait_s: float) -> RetryLater:
        """Queue the delivery again later, without an attempt: see receiver_limiter.py."""
        if record.scheduled_from and REDIS_CLOCK.now_s() - record.scheduled_from > MAX_DELIVERY_AGE_S:
            message = f"given up after {record.num_attempts} attempts: its receiver has not answered for days"
            raise self._give_up(job, message)
        delay_s = math.ceil(wait_s)
        return RetryLater({"delivered": False, "postponed_s": delay_s}, delay_s)

    def _give_up(self, job: Job, reason: str) -> Undeliverable:
        job.retries_left = 0
        job.extra_fields = {**job.extra_fields, "reason": reason}
        return Undeliverable(reason)


def trace_attempt(
    tracer: Tracer, job: Job, record: DeliveryRecord, number: int, attempt: DeliveryAttempt, host: str
) -> None:
    """Make the span of an attempt, if the submission of its job was traced."""
    parent = as_text(job.fields.get(JobField.TRACEPARENT, b""))
    if not parent:
        return
    about: dict[str, str | int | float | bool] = {
        "http.request.method": "POST",
        "http.request.resend_count": number - 1,
        "server.address": host,
        "scorepool.job.id": record.job_id,
        "scorepool.webhook.event": record.event,
    }
    span = tracer.begin("webhook", "client", parent, about, attempt.at)
    is_delivered = attempt.status is not None and attempt.status // 100 == 2
    error = None if is_delivered else "no_answer" if attempt.status is None else str(attempt.status)
    answer = {} if attempt.status is None else {"http.response.status_code": attempt.status}
    span.end(attempt.at + attempt.elapsed_ms / 1000, error, answer)


def retry_delay_s(number: int, retry_after_s: int | None) -> int:
    """Return the seconds from failed attempt `number` (from 1) to the next, at least what the receiver asks for."""
    scheduled_s = RETRY_DELAYS_S[number - 1] * random.uniform(1, 1 + JITTER)  # noqa: S311 - not a secret
    return round(max(scheduled_s, min(retry_after_s or 0, MAX_RETRY_AFTER_S)))


class WebhookWorker(Worker):
    """Serves the queue of deliveries in a process of its own, so that no worker with an engine waits for a receiver."""

    deliverer: Deliverer | None = None
    process = "webhooks"

    @property
    def capacity(self) -> int:
        """The most deliveries in flight."""
        return self.settings.webhook_max_in_flight

    def open(self) -> None:
        """Register the job function; raise SettingsError if the secrets are invalid."""
        self.deliverer = Deliverer(self.settings, self.connection, self.tracer)
        self.functions[DELIVER] = self.deliverer

    def handle_exception(self, job: Job, *exc_info: Any) -> None:  # type: ignore[override]
        """Log a delivery that is given up in one line: any client can cause thousands, by deleting an endpoint."""
        if isinstance(exc_info[1], Undeliverable):
            log.warning("%s", exc_info[1], extra={"job": job.id})
        else:
            super().handle_exception(job, *exc_info)

    def periodic_tasks(self) -> list[PeriodicTask]:
        return [PeriodicTask(self._evict_idle_connections, every_s=IDLE_TIMEOUT_S)]

    def close(self) -> None:
        if self.deliverer is not None:
            self.deliverer.close()

    def _evict_idle_connections(self) -> None:
        if self.deliverer is not None:
            self.deliverer.evict_idle_connections()
