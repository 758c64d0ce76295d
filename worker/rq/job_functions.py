"""Find the function that a job runs, or why it must not run."""

from collections.abc import Callable, Mapping

from scorepool.wire import Failure
from scorepool.worker.rq.errors import Crashed, Expired, JobError, Stopped
from scorepool.worker.rq.job import Job


def function_of(
    job: Job, functions: Mapping[str, Callable[[Job], object]], crash_limit: int
) -> Callable[[Job], object]:
    """Return the listed function that the job names.

    Raises Stopped, Expired, Crashed or JobError if the job must not run.
    """
    if job.expires_at is not None and job.expires_at <= job.leased_at:
        raise Expired  # first of all: the API has shown this already
    if job.cancel_requested:
        raise Stopped
    if job.crashes >= crash_limit:
        raise Crashed(f"its worker died {job.crashes} times while it ran this job alone, so it is not tried again")
    name = job.name()
    if job.parse_error is not None or name is None or job.instance is not None:
        raise _refusal("the job's record is not what this version writes: its data must be JSON, not pickle")
    if name not in functions:
        raise _refusal(f"{name!r} is not a function that this worker runs; it runs {', '.join(functions)}")
    if unlisted := job.unlisted_callbacks():
        raise _refusal(f"{unlisted[0]!r} is not a callback that this worker calls")
    return functions[name]


def _refusal(message: str) -> JobError:
    return JobError(Failure(code="invalid", message=message))
