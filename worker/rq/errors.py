"""The errors that end a job or the process, and the failure that a job's owner is shown for each.

What ends one job:                        code of its failure

JobError                                  the code that it carries
wire.Invalid                              invalid
rq.timeouts.JobTimeoutException           timeout
Stopped     its owner canceled it         canceled
Expired     its `expires_at` is over      expired
Crashed     it killed too many workers    crashed
any other exception                       internal

Postponed   it waits, and is claimed again later

What ends the process:

WorkerError
├── StartError    the worker cannot start, or not again: its message is printed as one sentence, exit status 1
└── FatalError    what runs the jobs has failed: the leases bring its jobs back

Errors are recognised by their class, never by their text. A job function maps the errors of what it calls (an engine)
to these.
"""

from collections.abc import Mapping

from rq.timeouts import JobTimeoutException

from scorepool.wire import Failure, Invalid


class JobError(Exception):
    """End the job with this failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.code}: {failure.message}")
        self.failure = failure


class Stopped(Exception):
    """The job's owner canceled it."""


class Expired(Exception):
    """The job's `expires_at` is over."""


class Postponed(Exception):
    """The job waits for something else. It goes to the scheduled jobs, as if it had not been claimed."""

    def __init__(self, delay_s: int, fields: Mapping[str, str]) -> None:
        """`fields` of the job's hash say what it waits for."""
        super().__init__(f"again in {delay_s} s")
        self.delay_s = delay_s
        self.fields = fields


class Crashed(Exception):
    """Too many workers died that ran this job alone."""


class WorkerError(Exception):
    """The process must end."""


class StartError(WorkerError):
    """The worker cannot start, or load its weights again. The message says why. Its jobs go back with all retries."""


class FatalError(WorkerError):
    """The part of the process that runs jobs has failed and cannot go on."""


def failure_of(error: BaseException, timeout_s: float | None) -> Failure:
    """Return the failure that the API shows to the job's owner."""
    match error:
        case JobError(failure=failure):
            return failure
        case Invalid(message=message, field=field):
            return Failure(code="invalid", message=message, field=field)
        case JobTimeoutException():
            return Failure(
                code="timeout",
                message=f"the job ran longer than its timeout_s of {timeout_s}; ask for more, or for less work",
            )
        case Expired():
            return Failure(code="expired", message="the job had not ended at its expires_at", field="expires_at")
        case Stopped():
            return Failure(code="canceled", message="canceled by its owner")
        case Crashed():
            return Failure(code="crashed", message=str(error))
        case _:
            return Failure(
                code="internal",
                message=f"the worker failed on this job ({type(error).__name__}); its log says where",
            )
