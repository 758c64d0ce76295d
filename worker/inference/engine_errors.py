"""The one place that maps the engine's errors to those of worker/rq.

engine                                    worker.rq

InvalidRequest                            JobError invalid; of an adapter that is not loaded with the field
ContextLengthExceeded                     JobError too_long; of the draft model's context with the field
NonFiniteLogits                           JobError numeric
ReloadError                               StartError: the process ends, and its jobs go back
EngineDeadError                           FatalError: the process ends
any other error                           itself; the job fails with `internal`
"""

from scorepool.engine.errors import (
    ContextLengthExceeded,
    DraftContextExceeded,
    EngineDeadError,
    InvalidRequest,
    NonFiniteLogits,
    ReloadError,
    UnknownAdapter,
)
from scorepool.wire import Failure
from scorepool.worker.rq.errors import FatalError, JobError, StartError


def map_engine_error(error: BaseException, has_items: bool = False) -> BaseException:
    """Return the error with which a job, or the process, ends when the engine raised this one.

    `has_items`: the sequences of the job are its items, so the one at fault is named as an item.
    """
    match error:
        case UnknownAdapter(message=message):
            return JobError(Failure(code="invalid", message=f"adapter: {message}", field="adapter"))
        case InvalidRequest(message=message):
            return JobError(Failure(code="invalid", message=message))
        case DraftContextExceeded(message=message):
            return JobError(Failure(code="too_long", message=f"specprefill: {message}", field="specprefill"))
        case ContextLengthExceeded(message=message, field=field):
            return JobError(Failure(code="too_long", message=message, field=field))
        case NonFiniteLogits(message=message, index=int(index)) if has_items:
            return JobError(Failure(code="numeric", message=f"items[{index}]: {message}", field=f"items[{index}]"))
        case NonFiniteLogits(message=message):
            return JobError(Failure(code="numeric", message=message))
        case ReloadError(message=message):
            return StartError(message)
        case EngineDeadError(message=message):
            return FatalError(message)
        case _:
            return error
