"""What a job's error is called in its outcome. Errors are told apart by class, never by their text.

wire.Invalid, engine.InvalidRequest  invalid          Stopped              canceled
engine.ContextLengthExceeded                too_long         Crashed              crashed
engine.NonFiniteLogits                numeric          anything else        internal
JobTimeoutException           timeout          Expired              expired
JobFailed                     what it says
"""

from rq.timeouts import JobTimeoutException

from scorepool.engine.errors import ContextLengthExceeded, InvalidRequest, NonFiniteLogits
from scorepool.wire import Failure, Invalid
from scorepool.worker.rq.in_flight import Crashed, Expired, Stopped


class JobError(Exception):
    """A job ends with this failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.code}: {failure.message}")
        self.failure = failure


def explain(error: BaseException, timeout_s: float | None) -> Failure:
    """The failure that the job's owner is shown."""
    match error:
        case JobError(failure=failure):
            return failure
        case Invalid(message=message, field=field):
            return Failure(code="invalid", message=message, field=field)
        case InvalidRequest(message=message):
            return Failure(code="invalid", message=message)
        case ContextLengthExceeded(message=message):
            return Failure(code="too_long", message=message)
        case NonFiniteLogits(message=message):
            return Failure(code="numeric", message=message)
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
