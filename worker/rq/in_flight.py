"""One job in flight: from its lease to the moment that its end is recorded. Sends no command to Redis.

    leased ──► running ──► over ──► recorded (worker/rq/commit.py), and forgotten
          └──────────────►┘

It is over exactly once, with a value or with an error; what comes later is dropped. Only the main thread touches it.
"""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

from redis import Redis
from rq.executions import Execution
from rq.queue import Queue

from scorepool.worker.claims.leases import ClaimedJob
from scorepool.worker.rq.errors import JobError, WorkerError
from scorepool.worker.rq.job import Callback, Job


@dataclass(frozen=True, slots=True)
class AsyncResult:
    """The return value of a job function whose job runs on, on other threads, after the function has returned."""

    future: "Future[Any]"
    finish: Callable[[Any], object]  # makes the job's result from the future's; called on the main thread
    cancel: Callable[[], object]
    num_rows: int = 1  # of a batch, that the job fills
    has_begun: Callable[[], bool] = lambda: True  # False while another worker can take the job without a loss


@dataclass(frozen=True, slots=True)
class Deadline:
    clock: Callable[[], float]  # one of clock.py
    at: float
    error: Exception


@dataclass(eq=False, slots=True)
class InFlightJob:
    job: Job
    queue: Queue
    execution: Execution
    async_result: AsyncResult | None = None
    deadlines: list[Deadline] = field(default_factory=list)
    has_begun: bool = False

    is_over: bool = False
    value: object = None
    error: BaseException | None = None

    is_decided: bool = False  # its callbacks were called and its retries counted: see worker/rq/commit.py
    is_being_stored: bool = False  # its result is on its way to the result store: see worker/rq/result_writer.py
    retry_delay_s: int | None = None  # the delay until it runs again; None: it does not run again

    @classmethod
    def from_claimed(
        cls, claimed: ClaimedJob, connection: Redis, worker_name: str, callbacks: Mapping[str, Callback]
    ) -> Self:
        """Return a job that was claimed for a worker and has not started."""
        job = Job.from_claimed(claimed, connection, callbacks)
        execution = Execution(claimed.execution_id, claimed.job_id, connection, worker_name)
        execution.created_at = datetime.fromtimestamp(claimed.leased_at, UTC)
        job.worker_name, job.started_at, job.last_heartbeat = worker_name, execution.created_at, execution.created_at
        return cls(job, claimed.queue, execution)

    @property
    def lease_key(self) -> str:
        """The name of its lease."""
        return f"{self.job.id}:{self.execution.id}"

    @property
    def end(self) -> str:
        """The end of a job that is over, for the log: "done", an error, or that it runs again."""
        if self.retry_delay_s is not None:
            return f"again in {self.retry_delay_s} s"
        if isinstance(self.error, JobError):
            return self.error.failure.code
        return type(self.error).__name__ if self.error else "done"

    def set_deadline(self, seconds: float, error: Exception, clock: Callable[[], float]) -> None:
        """Let the job fail with this error unless it is over in time. If there are several, the earliest one counts."""
        self.deadlines.append(Deadline(clock, clock() + seconds, error))

    def check_deadlines(self) -> float:
        """Fail the job if a deadline is over. Return the seconds until the next one, inf without one."""
        left_s = math.inf
        for deadline in self.deadlines:
            left_s = min(left_s, deadline.at - deadline.clock())
            if deadline.at <= deadline.clock():
                self.fail(deadline.error)
        return left_s

    def begins(self) -> bool:
        """True if the job has begun since the last call."""
        if self.has_begun or self.is_over:
            return False
        self.has_begun = self.async_result is None or self.async_result.has_begun()
        return self.has_begun

    @property
    def work(self) -> float:
        """How much it was, to compare workers' speeds by."""
        return self.job.work

    @property
    def owner(self) -> str:
        """The name of the API key that submitted the job."""
        return self.job.owner

    @property
    def num_rows(self) -> int:
        """The rows of a batch that the job fills."""
        return self.async_result.num_rows if self.async_result is not None else 1

    def run(self, function: Callable[[Job], object]) -> None:
        """Call the job's function. The job is over when it returns, unless it returns a Future or an AsyncResult."""
        answer = function(self.job)
        if isinstance(answer, Future):
            answer = AsyncResult(answer, finish=lambda value: value, cancel=answer.cancel)
        if isinstance(answer, AsyncResult):
            self.async_result = answer
        else:
            self.succeed(answer)

    def collect(self) -> None:
        """Take the job's result or error from its future. Raise WorkerError if the process must end."""
        if self.is_over or self.async_result is None:
            return
        try:
            self.succeed(self.async_result.finish(self.async_result.future.result(timeout=0)))
        except WorkerError:
            raise
        except Exception as error:
            self.fail(error)

    def succeed(self, value: object) -> None:
        if not self.is_over:
            self.is_over, self.value = True, value

    def fail(self, error: BaseException) -> None:
        if not self.is_over:
            self.is_over, self.error = True, error
            self.abandon()

    def abandon(self) -> None:
        """Cancel the job's asynchronous work: its result will not be used."""
        if self.async_result is not None:
            self.async_result.cancel()
