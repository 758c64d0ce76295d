"""The job function store.DELIVER: tell one receiver of one event, and try again for three days.

    rq worker -w scorepool.worker.WebhookWorker webhooks --with-scheduler

A delivery is an RQ job of its own, made in the transaction that ends the job it tells of, with all that its attempts
need (delivery_record.py). RQ keeps its retries: a failed attempt returns `RetryLater`, which RQ records as the
attempt's result, and RQ's scheduler brings the delivery back, so a killed worker forgets nothing. The worst that a
kill does is a second POST of the same bytes, with the same webhook-id.
"""

import logging
import math
import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from redis import Redis
from rq.job import Retry

from scorepool.store import DELIVER, Settings
from scorepool.wire import DeliveryAttempt, Subscriber
from scorepool.worker.rq.in_flight import AsyncResult
from scorepool.worker.rq.job import Job
from scorepool.worker.rq.periodic_tasks import PeriodicTask
from scorepool.worker.rq.worker import Worker
from scorepool.worker.webhooks.connection_pool import IDLE_S
from scorepool.worker.webhooks.delivery_record import DeliveryRecord
from scorepool.worker.webhooks.receiver_limiter import ReceiverLimiter
from scorepool.worker.webhooks.sender import MAX_RETRY_AFTER_S, Attempt, Sender, signers
from scorepool.worker.webhooks.subscribers import Subscribers

# Standard Webhooks' schedule: ten attempts, the last about 75 hours after the first.
SCHEDULE_S = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
JITTER = 0.2  # of each wait, on top, so that a receiver that comes back is not met by all at once
GIVE_UP_S = 4 * 86_400  # since the first attempt was due: ends what a receiver's silence would put off for ever
GONE = 410

log = logging.getLogger("rq.worker.webhook")  # below RQ's own, which has the handlers


class Undeliverable(Exception):
    """This receiver will not be told any more, unless somebody replays the delivery."""


class RetryLater(Retry, dict[str, Any]):
    """Try again in so many seconds. Also a dict, because RQ keeps an attempt's return value as JSON."""

    def __init__(self, report: dict[str, Any], interval_s: int) -> None:
        dict.__init__(self, report)
        Retry.__init__(self, max=10**6, interval=interval_s)  # ours to count: RQ counts what was put off, too


class Deliver:
    """Callable from the main thread; each delivery runs on a thread of its own, so a slow receiver holds up no other.

    Raises SettingsError where the secrets are not right.
    """

    def __init__(self, settings: Settings, connection: Redis) -> None:
        self._settings = settings
        self._sender = Sender(settings)
        self._lanes = ReceiverLimiter(settings.webhook_max_in_flight)
        self._subscribers = Subscribers(connection)
        self._threads = ThreadPoolExecutor(settings.webhook_max_in_flight, thread_name_prefix="delivery")

    def __call__(self, job: Job) -> AsyncResult | RetryLater:
        """Raises Undeliverable."""
        try:
            notice = DeliveryRecord.of(job)
        except ValueError as error:
            raise self._give_up(job, f"its record cannot be read: {error}") from None
        subscriber = self._subscribers.get(notice.owner, notice.endpoint) if notice.endpoint else None
        if notice.endpoint and subscriber is None:
            raise self._give_up(job, "its endpoint was deleted")
        if subscriber and subscriber.endpoint.disabled_at is not None:
            raise self._give_up(job, f"its endpoint is disabled: {subscriber.endpoint.disabled_reason}")
        url = subscriber.endpoint.url if subscriber else notice.url
        receiver = url.partition("://")[2].partition("/")[0].partition("?")[0].lower()
        wait_s = self._lanes.enter(notice.owner, receiver)
        if wait_s:
            return self._put_off(job, notice, wait_s)
        future = self._threads.submit(self._attempt, notice, url, subscriber)
        future.add_done_callback(partial(self._leave, notice.owner, receiver, time.monotonic()))
        return AsyncResult(future, finish=lambda attempt: self._finish(job, notice, attempt), cancel=future.cancel)

    def tidy(self) -> None:
        """Due every connections.IDLE_S."""
        self._sender.tidy()

    def close(self) -> None:
        self._sender.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _attempt(self, notice: DeliveryRecord, url: str, subscriber: Subscriber | None) -> Attempt:
        own = " ".join(subscriber.valid_secrets(time.time())) if subscriber else ""
        attempt = self._sender.send(url, notice.id, notice.body(self._settings), signers(own) if own else ())
        if subscriber is not None and attempt.status == GONE:
            self._subscribers.disable(notice.owner, subscriber.endpoint.id, "the receiver answered HTTP 410, Gone")
        return attempt

    def _leave(self, owner: str, receiver: str, started_at: float, future: "Future[Attempt]") -> None:
        is_answered = not future.cancelled() and future.exception() is None and future.result().status is not None
        self._lanes.leave(owner, receiver, time.monotonic() - started_at, is_answered)

    def _finish(self, job: Job, notice: DeliveryRecord, attempt: Attempt) -> dict[str, Any]:
        """What RQ records: the delivery is done, or to be tried again, or (Undeliverable) has failed for good."""
        number = notice.tries + 1
        seen = DeliveryAttempt(
            at=round(time.time() - attempt.elapsed_ms / 1000, 3),
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
        job.extra_fields = notice.after(seen)
        if attempt.is_delivered:
            log.info("%s: delivered to %s", job.id, attempt)
            return report
        if attempt.is_final or number > len(SCHEDULE_S):
            why = "not to be tried again" if attempt.is_final else f"given up after {number} attempts"
            raise self._give_up(job, f"{why}: {attempt}")
        interval_s = wait_s(number, attempt.retry_after_s)
        log.warning("%s: attempt %d failed, the next in %d s: %s", job.id, number, interval_s, attempt)
        return RetryLater(report | {"retry_in_s": interval_s}, interval_s)

    def _put_off(self, job: Job, notice: DeliveryRecord, wait_s: float) -> RetryLater:
        """Its receiver has as many deliveries as it is given, or has been silent: see receiver_limiter.py."""
        if notice.since and time.time() - notice.since > GIVE_UP_S:
            raise self._give_up(job, f"given up after {notice.tries} attempts: its receiver has not answered for days")
        interval_s = math.ceil(wait_s)
        return RetryLater({"delivered": False, "put_off_s": interval_s}, interval_s)

    def _give_up(self, job: Job, reason: str) -> Undeliverable:
        job.retries_left = 0
        job.extra_fields = {**job.extra_fields, "reason": reason}
        return Undeliverable(reason)


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

    def periodic_tasks(self) -> list[PeriodicTask]:
        return [PeriodicTask(self._tidy, every_s=IDLE_S)]

    def close(self) -> None:
        if self.deliver is not None:
            self.deliver.close()

    def _tidy(self) -> None:
        if self.deliver is not None:
            self.deliver.tidy()
