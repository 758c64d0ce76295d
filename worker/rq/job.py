"""RQ's Job and Queue, made safe: no pickle, nothing imported because Redis names it, and an outcome with every end."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from types import MappingProxyType, UnionType
from typing import Any, ClassVar

import rq.job
import rq.queue
import rq.serializers
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import RedisError, ResponseError
from rq.exceptions import DeserializationError, InvalidJobOperation
from rq.serializers import JSONSerializer
from rq.utils import as_text

from scorepool.store import INFER, JobField, Keys, rq_queue
from scorepool.store.clock import clock_s
from scorepool.store.scripts import load
from scorepool.wire import Failure, encode
from scorepool.worker.claims.leases import ClaimedJob, record_outcome
from scorepool.worker.redis_link.wrong_types import is_wrong_type
from scorepool.worker.rq.scheduler import enqueue

MAX_NUMBER = 10**10  # of seconds and counts in a job's hash; a greater one is an error
DEFAULT_TTL_S = 86_400  # of the outcome of a job whose hash has no TTL
# Parsed here: RQ uses strptime, which takes 8 % of the time of a job that computes nothing.
TIME_FIELDS = (
    JobField.CREATED_AT,
    JobField.ENQUEUED_AT,
    JobField.STARTED_AT,
    JobField.ENDED_AT,
    JobField.LAST_HEARTBEAT,
)
CANCELED_BY_EMPTY = encode(Failure(code="canceled", message="the server's operator emptied the queue"))

# `resolve_serializer(None)` and the command line's default name these: with them replaced, `rq worker`, `rq info` and
# everything else in a process that has imported `scorepool.worker.rq` cannot unpickle what is in Redis.
rq.serializers.DefaultSerializer = JSONSerializer  # type: ignore[misc, assignment]
rq.serializers.PickleSerializer = JSONSerializer  # type: ignore[assignment]
rq.serializers.SERIALIZER_ALIASES["pickle"] = JSONSerializer

Callback = Callable[..., object]


class Job(rq.job.Job):
    """A job whose data is JSON, whose function runs only if the worker lists it, and whose end is an outcome.

    `outcome` is wire.encode(Result | Failure), set before the job is ended; RQ's own handlers then write it in the
    transaction in which they end the job, whoever calls them.
    """

    callbacks: Mapping[str, Callback] = MappingProxyType({})  # the callbacks that may be called, by name
    outcome: bytes | None = None
    request: bytes | None = None
    has_outcome = False  # jobs of the API end with an outcome; those of other functions only with RQ's result
    max_concurrency: int | None = None  # most jobs that may be in flight with it: one of them may have killed a worker
    crashes = 0  # deaths of workers that ran this job alone
    cancel_requested = False
    expires_at: float | None = None  # unix, s
    leased_at = 0.0  # unix, s, by Redis's clock, like `expires_at`
    claimed_at = 0.0  # clock_s() at that time
    lease_key = ""  # the name of its lease
    parse_error: Exception | None = None
    fields: Mapping[str, bytes] = MappingProxyType({})  # all fields of its hash, as they were read
    extra_fields: Mapping[str, str] = MappingProxyType({})  # fields that are written with its end, set by its function
    on_recorded: Callable[[], object] | None = None  # called when its success is recorded, set by its function
    work = 1.0  # how much it was, to compare workers' speeds by; set by its function

    def __init__(
        self,
        id: str | None = None,  # noqa: A002
        connection: Redis | None = None,
        serializer: object = None,
    ) -> None:
        super().__init__(id, connection)  # RQ's check of a serializer argument takes longer than everything else here
        self.serializer = JSONSerializer

    @classmethod
    def from_claimed(cls, claimed: ClaimedJob, connection: Redis, callbacks: Mapping[str, Callback]) -> "Job":
        """Return the leased job. An error in its hash is kept in `parse_error`, and the job fails with it."""
        job = cls(claimed.job_id, connection)
        try:
            job.restore(claimed.fields)
            job._check()
        except Exception as error:  # errors in the hash fail only this job
            job = cls(claimed.job_id, connection)  # without the fields read so far: they may be wrong too
            job.data = claimed.fields[JobField.DATA.encode()]
            job.has_outcome = JobField.KIND.encode() in claimed.fields
            job.parse_error = error
        job.request, job.lease_key = claimed.request, claimed.lease_key
        job.leased_at, job.claimed_at = claimed.leased_at, clock_s()
        job.callbacks = callbacks
        job.origin = claimed.queue.name
        job._status = rq.job.JobStatus.STARTED
        return job

    @classmethod
    def fetch_many(cls, job_ids: Iterable[str], connection: Redis, serializer: object = None) -> list[Any]:
        """Return jobs by id; None for a job that is absent or cannot be read."""
        jobs: list[rq.job.Job | None] = []
        for job_id in job_ids:
            try:
                jobs += super().fetch_many([job_id], connection)
            except Exception as error:  # errors in the hash
                if isinstance(error, RedisError) and not is_wrong_type(error):
                    raise
                jobs.append(None)
        return jobs

    @property
    def weight(self) -> int:
        """The owner's share of a worker, 1 or more."""
        weight = as_text(self.fields.get(JobField.WEIGHT, b"1"))
        return int(weight) if weight.isdecimal() and 0 < len(weight) < 10 and int(weight) else 1

    @property
    def is_of_one_of_several(self) -> bool:
        """True if the API knows several owners."""
        return JobField.WEIGHT in self.fields

    def dependencies_are_met(self, *args: Any, **kwargs: Any) -> bool:
        """True if the job may run. False if the keys that hold its dependencies have a wrong type."""
        try:
            return super().dependencies_are_met(*args, **kwargs)
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            return False

    def restore(self, raw_data: Any) -> None:
        """Read the hash without RQ's webhooks: they are one unsigned attempt on the main thread, to any address.

        A `meta` that is not JSON is dropped, because RQ would keep it in a form that it cannot write again.
        """
        fields = self.fields = {as_text(name): value for name, value in raw_data.items() if name != b"webhooks"}
        super().restore({name: value for name, value in fields.items() if name not in TIME_FIELDS})
        for name in TIME_FIELDS:
            if text := fields.get(name):
                setattr(self, name, datetime.fromisoformat(as_text(text)).replace(tzinfo=UTC))
        if "unserialized" in self.meta:
            self.meta = {}
        self.max_concurrency = int(fields[JobField.MAX_CONCURRENCY]) if JobField.MAX_CONCURRENCY in fields else None
        self.crashes = int(fields.get(JobField.CRASHES) or 0)
        self.expires_at = float(fields[JobField.EXPIRES_AT]) if JobField.EXPIRES_AT in fields else None
        self.cancel_requested = as_text(fields.get(JobField.CANCEL_REQUESTED) or "") == "1"
        self.has_outcome = JobField.KIND in fields or self.name() == INFER

    def _check(self) -> None:
        """Check what RQ reads unchecked and fails on when it writes the job's end. Raises ValueError."""
        numbers = (self.timeout, self.result_ttl, self.failure_ttl, self.retries_left, self.repeats_left)
        for number in (*numbers, self.number_of_retries, self.crashes):
            if number is not None and not -MAX_NUMBER <= float(number) <= MAX_NUMBER:
                raise ValueError(f"a number of the job's record is beyond {MAX_NUMBER}")
        for intervals in (self.retry_intervals, self.repeat_intervals):
            if intervals is not None and not _is_list_of(intervals, int | float):
                raise ValueError("the intervals of the job's record are no list of numbers")
        if not _is_list_of(self._dependency_ids, str):
            raise ValueError("the dependencies of the job's record are no list of ids")

    def name(self) -> str | None:
        """Return the name of the job's function; None if the hash's data is not the expected JSON."""
        try:
            return self.func_name
        except (DeserializationError, ValueError):
            return None

    @property
    def owner(self) -> str:
        """The name of the key that submitted the job; empty if it has none."""
        return as_text(self.fields.get(JobField.OWNER, b""))

    @property
    def func(self) -> Callable[..., Any]:
        raise InvalidJobOperation("this project's jobs name functions that a worker lists; none is imported")

    def _callback(self, name: str | None) -> Callback | None:
        return self.callbacks.get(name) if name else None

    @property
    def success_callback(self) -> Callback | None:
        return self._callback(self._success_callback_name)

    @property
    def failure_callback(self) -> Callback | None:
        return self._callback(self._failure_callback_name)

    @property
    def stopped_callback(self) -> Callback | None:
        return self._callback(self._stopped_callback_name)

    def unlisted_callbacks(self) -> list[str]:
        names = (self._success_callback_name, self._failure_callback_name, self._stopped_callback_name)
        return [name for name in names if name and name not in self.callbacks]

    def _handle_success(self, result_ttl: int, pipeline: Pipeline, *args: Any, **kwargs: Any) -> None:
        super()._handle_success(result_ttl, pipeline, *args, **kwargs)
        if self.outcome is not None:
            record_outcome(pipeline, self.id, self.outcome, result_ttl or DEFAULT_TTL_S, keep_request=False)

    def _handle_failure(self, exc_string: str, pipeline: Pipeline, *args: Any, **kwargs: Any) -> None:
        super()._handle_failure(exc_string, pipeline, *args, **kwargs)
        if self.outcome is None and self.has_outcome:  # one of RQ's own cleaners ends the job
            self.outcome = encode(Failure(code="crashed", message="the worker that ran this job is gone"))
        if self.outcome is not None:
            ttl_s = self.failure_ttl or DEFAULT_TTL_S
            keep_request = self._status != rq.job.JobStatus.STOPPED  # so that `rq requeue` works
            canceled_queue = "" if keep_request else self.origin
            record_outcome(pipeline, self.id, self.outcome, ttl_s, keep_request, canceled_queue)

    def as_current(self) -> AbstractContextManager[None]:
        """Make this the job that rq.get_current_job() returns, on this thread.

        A job of the API is left out: its function gets the job itself, and RQ's stack would take 5 % of its time.
        """
        return nullcontext() if self.has_outcome else _on_stack(self)

    def redis_now(self) -> datetime:
        """Return the time by Redis's clock, counted on from the claim: never before the job's start."""
        return datetime.fromtimestamp(self.leased_at + clock_s() - self.claimed_at, UTC)


@contextmanager
def _on_stack(job: Job) -> Iterator[None]:
    rq.job._job_stack.push(job)
    try:
        yield
    finally:
        rq.job._job_stack.pop()


class Queue(rq.queue.Queue):
    """A queue of our Jobs, whatever class and serializer the caller asks for."""

    job_class: ClassVar[type[rq.job.Job]] = Job  # type: ignore[misc]

    def __init__(self, name: str = "default", connection: Redis | None = None, **kwargs: Any) -> None:
        kwargs |= {"job_class": Job, "serializer": JSONSerializer}
        super().__init__(name, connection, **kwargs)

    @property
    def count(self) -> int:
        """The number of waiting jobs that `rq info` shows, with those behind RQ's list (store/lua/backlog.lua)."""
        owners = self.connection.zrange(Keys.fair_share(self.name), 0, -1)
        with self.connection.pipeline() as pipeline:
            pipeline.llen(self.key)
            for owner in owners:
                pipeline.llen(Keys.backlog(self.name, as_text(owner)))  # type: ignore[arg-type]
            return sum(pipeline.execute())

    def push_job_id(self, job_id: str, pipeline: Pipeline | None = None, at_front: bool = False) -> None:
        """Put a job on the queue, also if the key of its list has a wrong type: see store/lua/push_job.lua."""
        enqueue(self.connection if pipeline is None else pipeline, self.name, job_id, is_at_front=at_front)

    def empty(self) -> int:
        """End every waiting job of the API as canceled and delete the others (`rq empty`).

        Return how many there were.
        """
        script = self.connection.register_script(load("empty.lua"))
        return int(script(args=[self.name, CANCELED_BY_EMPTY, DEFAULT_TTL_S]))

    @classmethod
    def from_rq(cls, queue: rq.queue.Queue) -> "Queue":
        """Return the queue of that name of this deployment, as one of our class."""
        name = rq_queue(queue.name)
        if isinstance(queue, cls) and queue.name == name:
            return queue
        return cls(name, connection=queue.connection)


def _is_list_of(value: object, kind: type | UnionType) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def elapsed_s(since: datetime | None, until: datetime) -> float:
    """Return the seconds between two times, 0.0 without the first."""
    return (until - since).total_seconds() if since else 0.0
