"""The engine's errors become the worker's: a failure of the job, or the end of the process."""

import pytest

from scorepool import wire
from scorepool.engine.errors import (
    ContextLengthExceeded,
    DraftContextExceeded,
    EngineDeadError,
    InvalidRequest,
    NonFiniteLogits,
)
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


def test_a_prompt_too_long_for_the_draft_model_names_the_field_that_asks_for_it():
    mapped = map_engine_error(DraftContextExceeded("the sequence has 9000 tokens"))
    assert isinstance(mapped, JobError)
    assert mapped.failure == wire.Failure(
        code="too_long", message="specprefill: the sequence has 9000 tokens", field="specprefill"
    )


def test_a_dead_engine_ends_the_process():
    assert isinstance(map_engine_error(EngineDeadError("the engine failed")), FatalError)


def test_any_other_error_stays_as_it_is():
    error = KeyError("prompt")
    assert map_engine_error(error) is error
