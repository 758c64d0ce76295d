"""The engine's errors become the worker's: a failure of the job, or the end of the process."""

import pytest

from scorepool.engine.errors import ContextLengthExceeded, EngineDeadError, InvalidRequest, NonFiniteLogits
from scorepool.worker.inference.engine_errors import map_engine_error
from scorepool.worker.rq.errors import FatalError, JobError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("token 9 is outside the vocabulary"), "invalid"),
        (ContextLengthExceeded("5000 tokens are more than 4096"), "too_long"),
        (NonFiniteLogits("NaN"), "numeric"),
    ],
)
def test_an_error_of_the_request_fails_its_job(error: Exception, code: str):
    mapped = map_engine_error(error)
    assert isinstance(mapped, JobError)
    assert (mapped.failure.code, mapped.failure.message) == (code, str(error))


def test_a_dead_engine_ends_the_process():
    assert isinstance(map_engine_error(EngineDeadError("the engine failed")), FatalError)


def test_any_other_error_stays_as_it_is():
    error = KeyError("prompt")
    assert map_engine_error(error) is error
