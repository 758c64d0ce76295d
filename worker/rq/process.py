"""RQ's worker as a process: signals, commands, wake-ups and scheduler, without RQ's assumption of one job at a time.

This module changes no job. It posts signals and messages to the main thread as calls, which worker.py runs there.
"""

import logging
import math
import queue
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from types import FrameType
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from rq import worker_registration
from rq.command import parse_payload
from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT
from rq.group import Group
from rq.serializers import JSONSerializer
from rq.utils import as_text
from rq.worker import BaseWorker

from scorepool.store import Keys, Settings, SettingsError, rq_queue
from scorepool.worker.claims.dead_workers import is_dead, machine_id, pid_namespace
from scorepool.worker.claims.leases import ClaimedJob
from scorepool.worker.claims.messages import read_leased, read_message
from scorepool.worker.redis_link.wrong_types import WrongTypeLog, has_type
from scorepool.worker.rq.clock import REDIS_CLOCK, clock_s
from scorepool.worker.rq.job import Job, Queue
from scorepool.worker.rq.redis_errors import REDIS_UNAVAILABLE
from scorepool.worker.rq.scheduler import Scheduler

PUBSUB_RETRY_S = 2.0
RELEASE_S = 5.0  # at most, of the time to drain, to put jobs back; and as much again to unregister
FORCED_END_S = 5.0  # from a second signal to the end


class WorkerProcess(BaseWorker):
    queue_class = Queue  # type: ignore[assignment]
    job_class = Job
    connection_timeout = 10  # seconds after which a Redis that does not answer counts as unavailable

    def __init__(self, queues: Any, *args: Any, **kwargs: Any) -> None:
        """Take rq.Worker's arguments. Job class, queue class and serializer are always ours: see job.py."""
        kwargs |= {"job_class": Job, "queue_class": Queue, "serializer": JSONSerializer}
        queues = [queues] if isinstance(queues, str) else queues
        ours: list[Any] = [rq_queue(one) if isinstance(one, str) else Queue.from_rq(one) for one in queues]
        super().__init__(ours, *args, **kwargs)
        self.connection.set_retry(Retry(NoBackoff(), 0))  # a claim whose answer was lost must be repeated as such
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_interruptible = False  # the main thread runs code that may take long: a second signal ends it there
        self._release_at = math.inf  # clock_s(), when what is not over is put back; once it is asked to stop
        self._drain_deadline: float | None = None  # clock_s(), when the loop ends; once it is asked to stop
        self._end_at = math.inf  # clock_s(), when the process ends; once it is asked to stop
        self._stop_requested_at = math.inf  # clock_s()

    @cached_property
    def settings(self) -> Settings:
        return Settings.load()

    @cached_property
    def wrong_types(self) -> WrongTypeLog:
        return WrongTypeLog(self.log)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        self._is_interruptible = True
        try:
            yield
        finally:
            self._is_interruptible = False

    def _set_ip_address(self, connection: Redis) -> None:
        """Set the address that `rq info` shows. RQ itself lists the connections of all clients for it."""
        try:
            connection.client_setname(self.name)
            self.ip_address = str(connection.client_info()["addr"])
        except ResponseError:  # some services have no CLIENT
            self.ip_address = "unknown"

    # A subclass defines what these do, on the main thread.

    def _stop_job(self, job_id: str) -> None:
        """Stop one job."""
        raise NotImplementedError

    def _show_shutdown(self) -> None:
        """Write that this worker was asked to stop."""
        raise NotImplementedError

    def _wake_up(self) -> None:
        """Look for jobs."""
        raise NotImplementedError

    def _take_leased(self, claimed: ClaimedJob) -> None:
        """Take a job that was leased to this worker without a claim."""
        raise NotImplementedError

    def _yield_job(self, lease_key: str) -> None:
        """Drop the job of this lease, which an idle worker has taken."""
        raise NotImplementedError

    def _lose_messages(self) -> None:
        """Find out what messages would have told that were lost."""
        raise NotImplementedError

    def _post_call(self, call: Callable[[], object]) -> None:
        """Post a call, which the main thread runs. Any thread and any signal handler may post one."""
        self._calls.put(call)

    def _posted_calls(self, timeout_s: float) -> Iterator[Callable[[], object]]:
        """Wait for the first call, then yield all there are."""
        try:
            yield self._calls.get(timeout=timeout_s)
            while True:
                yield self._calls.get_nowait()
        except queue.Empty:
            return

    def serialize(self) -> dict[str, Any]:
        return {**super().serialize(), "machine": machine_id(), "pid_namespace": pid_namespace()}

    def register_birth(self) -> None:
        """Register this worker. A worker restarted under its --name replaces the killed one."""
        REDIS_CLOCK.measure(self.connection, num_samples=3)
        if not has_type(self.connection, self.key, "hash") or is_dead(
            self.connection, self.name, self.settings.lease_s
        ):
            self.connection.delete(self.key)
        try:
            with self.wrong_types.tolerate("register"):
                super().register_birth()
        except ValueError:
            raise SettingsError(
                f"--name {self.name}: a worker of that name lives, or died a moment ago on another machine or in "
                "another container"
            ) from None

    def heartbeat(self, timeout: int | None = None, pipeline: Pipeline | None = None) -> None:
        """Write the whole registration, which may have expired while this process or Redis stood still.

        Measure Redis's clock, too: the heartbeat is a time of that clock.
        """
        REDIS_CLOCK.measure(self.connection)
        super().heartbeat(timeout, pipeline)
        connection = self.connection if pipeline is None else pipeline
        connection.hset(self.key, mapping=self.serialize())  # type: ignore[arg-type]
        worker_registration.register(self, pipeline)

    def register_death(self) -> None:
        with self.wrong_types.tolerate("unregister"):
            super().register_death()

    def set_state(self, state: str, pipeline: Pipeline | None = None) -> None:
        with self.wrong_types.tolerate("set the state"):
            super().set_state(state, pipeline)

    def set_shutdown_requested_date(self) -> None:
        with self.wrong_types.tolerate("set the time of the shutdown"):
            super().set_shutdown_requested_date()

    def handle_warm_shutdown_request(self) -> None:
        """Log nothing: a signal may interrupt another line. `_show_shutdown` logs it."""

    def wake_up_calls(self) -> dict[str, Callable[[], None]]:
        """Return what to call at messages on other channels, by their names. A subclass overrides it."""
        return {}

    def subscribe(self) -> None:
        """Subscribe to RQ's commands, and to the wake-up channels of our queues."""
        self.pubsub = self.connection.pubsub()
        wake_ups = {Keys.wakeup(name): self._take_message for name in self.queue_names()}
        others = {name: partial(_call, wake) for name, wake in self.wake_up_calls().items()}
        own = {self.pubsub_channel_name: self.handle_payload, Keys.wake(self.name): self._take_message}
        self.pubsub.subscribe(**own, **wake_ups, **others)
        self.pubsub_thread = self.pubsub.run_in_thread(  # type: ignore[assignment]
            sleep_time=60, daemon=True, exception_handler=self._pubsub_exception_handler
        )

    def unsubscribe(self) -> None:
        """Stop RQ's thread, then wake it by a message. RQ uses the reverse order and then waits for a second."""
        if self.pubsub is not None and self.pubsub_thread is not None:
            self.pubsub_thread.stop()
            self.pubsub.unsubscribe()
            self.pubsub_thread.join(timeout=1)

    def _take_message(self, message: Mapping[str, Any]) -> None:
        """Take a message about jobs. Those that come to this worker alone may hold more than that there are some."""
        is_own = message["channel"] == Keys.wake(self.name).encode()
        try:
            match read_message(message["data"]) if is_own else []:
                case [b"taken", lease_key]:
                    self._post_call(partial(self._yield_job, as_text(lease_key)))
                case [b"leased", *strings]:
                    self._post_call(partial(self._take_leased, read_leased(strings, self.queues)))
                case _:
                    self._post_call(self._wake_up)
        except ValueError as error:  # any client of Redis can publish any message
            self.log.warning("a message that cannot be read: %s", error)

    def handle_payload(self, message: dict[str, Any]) -> None:
        try:
            payload = parse_payload(message)
            if payload["command"] == "stop-job":
                self._post_call(partial(self._stop_job, payload["job_id"]))
            else:
                super().handle_payload(message)
        except (ValueError, TypeError, KeyError, RecursionError) as error:  # any client can publish any message
            self.log.warning("a message that is no command: %r", error)

    def _pubsub_exception_handler(self, exc: Exception, pubsub: Any, pubsub_thread: Any) -> None:
        """Return, so that the thread tries again, after every error.

        RQ would end the thread after most, and the worker would miss all commands until it is restarted.
        """
        self._post_call(self._lose_messages)
        is_away = isinstance(exc, (RedisConnectionError, RedisTimeoutError))
        if not is_away and pubsub.connection is not None:
            pubsub.connection.disconnect()  # what follows on it may be the rest of a reply that cannot be read
        # The loop logs that Redis is away, once; every other thread would say so again.
        self.log.log(logging.DEBUG if is_away else logging.ERROR, "messages of Redis cannot be read: %r", exc)
        time.sleep(PUBSUB_RETRY_S)

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """Drain. Only sets flags, because a signal can interrupt any statement."""
        self._shutdown_requested_date = REDIS_CLOCK.now()
        self._stop_requested_at = clock_s()
        self._stop_requested = True
        self._end_in(self.settings.drain_timeout_s)
        signal.signal(signal.SIGINT, self.request_force_stop)
        signal.signal(signal.SIGTERM, self.request_force_stop)
        self.handle_warm_shutdown_request()
        self._post_call(self._show_shutdown)

    def _end_in(self, seconds: float) -> None:
        """End the process then at the latest: put jobs back before, and keep some time to unregister."""
        share_s = min(RELEASE_S, seconds / 5)
        self._end_at = clock_s() + seconds
        self._drain_deadline = self._end_at - share_s
        self._release_at = self._drain_deadline - share_s

    def request_force_stop(self, signum: int, frame: FrameType | None) -> None:
        """Put everything back now. Two signals within a second count as one: `rq worker-pool` sends each twice."""
        if clock_s() - self._stop_requested_at < 1:
            return
        self._end_in(FORCED_END_S)
        self._release_at = clock_s()
        self._post_call(lambda: self.log.warning("asked to stop again: what is not over is put back now"))
        if self._is_interruptible:
            raise SystemExit

    def _start_scheduler(
        self,
        burst: bool = False,
        logging_level: str | None = None,
        date_format: str = DEFAULT_LOGGING_DATE_FORMAT,
        log_format: str = DEFAULT_LOGGING_FORMAT,
    ) -> None:
        level = logging_level if logging_level is not None else self.log.level
        self.scheduler = Scheduler(
            self.queues, self.connection, 1, level, date_format, log_format, serializer=self.serializer
        )
        self.scheduler.start()
        if burst:
            self.scheduler.enqueue_scheduled_jobs()

    def stop_scheduler(self) -> None:
        if self.scheduler is not None:
            with self.wrong_types.tolerate("stop the scheduler"):
                self.scheduler.stop()

    def run_maintenance_tasks(self) -> None:
        """Run RQ's own cleaners. An error of theirs means that Redis holds what they cannot read."""
        try:
            self.clean_registries()
            Group.clean_registries(connection=self.connection)
        except REDIS_UNAVAILABLE:
            raise
        except Exception as error:
            self.last_cleaned_at = REDIS_CLOCK.now()  # type: ignore[assignment] # without it, RQ retries at once, again and again
            self.log.error("RQ's registries are not cleaned: %s: %s", type(error).__name__, error)

    def _tick_scheduler(self) -> None:
        if isinstance(self.scheduler, Scheduler):
            self.scheduler.tick()


def _call(function: Callable[[], None], _: object) -> None:
    """Call a function at a message, whatever it holds."""
    function()
