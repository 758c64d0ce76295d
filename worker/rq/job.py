"""RQ's Job and Queue, made safe: no pickle, nothing imported because Redis names it, and an outcome with every end."""

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from types import MappingProxyType, UnionType
from typing import Any, ClassVar

import rq.job
import rq.queue
import rq.serializers
from redis import Redis
from redis.client import Pipeline
from rq.exceptions import DeserializationError, InvalidJobOperation
from rq.serializers import JSONSerializer
from rq.utils import as_text, now, utcformat

from scorepool.store import INFER, Keys
from scorepool.wire import Failure, encode
from scorepool.worker.rq.leases import EMPTY, ClaimedJob, record_outcome

MAX_NUMBER = 10**10  # in a job's record: seconds and counts beyond it are no one's honest wish
DEFAULT_TTL_S = 86_400  # of the outcome of a job that does not say
EMPTIED = encode(Failure(code="canceled", message="the server's operator emptied the queue"))

# `resolve_serializer(None)` and the command line's default name these: with them replaced, `rq worker`, `rq info` and
# everything else in a process that has imported `worker` cannot unpickle what is in Redis.
rq.serializers.DefaultSerializer = JSONSerializer  # type: ignore[misc, assignment]
rq.serializers.PickleSerializer = JSONSerializer  # type: ignore[assignment]
rq.serializers.SERIALIZER_ALIASES["pickle"] = JSONSerializer

Callback = Callable[..., object]


class Job(rq.job.Job):
    """A job whose data is JSON, whose function runs only if the worker lists it, and whose end is an outcome.

    `outcome` is wire.encode(Result | Failure), set before the job is ended; RQ's own handlers then write it in the
    transaction in which they end the job, whoever calls them.
    """

    callbacks: Mapping[str, Callback] = MappingProxyType({})  # those that may be called, by name
    outcome: bytes | None = None
    request: bytes | None = None
    has_outcome = False  # jobs of the API have; other functions' jobs only have RQ's result
    max_concurrency: int | None = None  # most jobs that may be in flight with it: one of them may have killed a worker
    crashes = 0  # deaths of a worker that it had to itself
    cancel_requested = False
    expires_at: float | None = None  # unix, s
    leased_at = 0.0  # unix, s, by Redis's clock, as `expires_at` is judged
    parse_error: Exception | None = None
    fields: Mapping[str, bytes] = MappingProxyType({})  # of its hash, as they were read; RQ's and others'
    extra_fields: Mapping[str, str] = MappingProxyType({})  # fields that its function wants written with its end

    def __init__(
        self,
        id: str | None = None,  # noqa: A002
        connection: Redis | None = None,
        serializer: object = None,
    ) -> None:
        super().__init__(id, connection)  # RQ looks at a serializer that it is given for longer than we do at a job
        self.serializer = JSONSerializer

    @classmethod
    def from_claimed(cls, row: ClaimedJob, connection: Redis, callbacks: Mapping[str, Callback]) -> "Job":
        """The leased job. What cannot be read is kept in `parse_error`, for the job to fail with."""
        job = cls(row.job_id, connection)
        try:
            job.restore(row.fields)
            job._check()
        except Exception as error:  # whatever somebody wrote into the hash is this job's fault alone
            job = cls(row.job_id, connection)  # nothing of what was read before is kept: it may be no better
            job.data = row.fields[b"data"]
            job.has_outcome = b"kind" in row.fields
            job.parse_error = error
        job.request = row.request
        job.leased_at = row.leased_at
        job.callbacks = callbacks
        job.origin = row.queue.name
        job._status = rq.job.JobStatus.STARTED
        return job

    def restore(self, raw_data: Any) -> None:
        """RQ's webhooks are dropped: they are one unsigned, unguarded attempt on the worker's main thread. So is a meta
        that is no JSON: RQ would keep it in a form that it cannot write again."""
        fields = self.fields = {as_text(name): value for name, value in raw_data.items() if name != b"webhooks"}
        super().restore(fields)
        if "unserialized" in self.meta:
            self.meta = {}
        self.max_concurrency = int(fields["company"]) if "company" in fields else None
        self.crashes = int(fields.get("crashes") or 0)
        self.expires_at = float(fields["expires_at"]) if "expires_at" in fields else None
        self.cancel_requested = as_text(fields.get("cancel_requested") or "") == "1"
        self.has_outcome = "kind" in fields or self.name() == INFER

    def _check(self) -> None:
        """What RQ reads without looking, and stumbles over when it writes the job's end. Raises ValueError."""
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
        """Of the function; None if the data is not the JSON that it should be."""
        try:
            return self.func_name
        except (DeserializationError, ValueError):
            return None

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
        if self.outcome is None and self.has_outcome:  # one of RQ's own cleaners found it
            self.outcome = encode(Failure(code="crashed", message="the worker that ran this job is gone"))
        if self.outcome is not None:
            ttl_s = self.failure_ttl or DEFAULT_TTL_S
            keep_request = self._status != rq.job.JobStatus.STOPPED  # so that `rq requeue` works
            record_outcome(pipeline, self.id, self.outcome, ttl_s, keep_request)
            if not keep_request:
                self._file_as_canceled(ttl_s, pipeline)

    def _file_as_canceled(self, ttl_s: int, pipeline: Pipeline) -> None:
        """As the API's cancel leaves a job that waited. RQ files a stopped job as failed, and `rq requeue --all` would
        then run it again."""
        pipeline.zrem(self.failed_job_registry.key, self.id)
        canceled = f"rq:canceled:{self.origin}"
        pipeline.zadd(canceled, {self.id: time.time()})
        if ttl_s > 0:
            pipeline.zremrangebyscore(canceled, "-inf", time.time() - ttl_s)
            pipeline.expire(self.key, ttl_s)


class Queue(rq.queue.Queue):
    """A queue of our Jobs, whatever class and serializer the caller asks for."""

    job_class: ClassVar[type[rq.job.Job]] = Job  # type: ignore[misc]

    def __init__(self, name: str = "default", connection: Redis | None = None, **kwargs: Any) -> None:
        kwargs |= {"job_class": Job, "serializer": JSONSerializer}
        super().__init__(name, connection, **kwargs)

    @property
    def count(self) -> int:
        """Jobs that wait, also those behind RQ's list (see lua/backlog.lua): what `rq info` shows."""
        owners = self.connection.zrange(Keys.fair_share(self.name), 0, -1)
        with self.connection.pipeline() as pipeline:
            pipeline.llen(self.key)
            for owner in owners:
                pipeline.llen(Keys.backlog(self.name, as_text(owner)))  # type: ignore[arg-type]
            return sum(pipeline.execute())

    def empty(self) -> int:
        """`rq empty`: what was accepted ends all the same, as canceled. Returns how many jobs there were."""
        script = self.connection.register_script(EMPTY)
        return int(script(keys=[self.key], args=[EMPTIED, utcformat(now()), DEFAULT_TTL_S]))

    @classmethod
    def from_rq(cls, queue: rq.queue.Queue) -> "Queue":
        return queue if isinstance(queue, cls) else cls(queue.name, connection=queue.connection)


def _is_list_of(value: object, kind: type | UnionType) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def age_s(since: datetime | None, until: datetime) -> float:
    return (until - since).total_seconds() if since else 0.0
