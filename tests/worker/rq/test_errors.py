"""Codes and messages of failures: each error class has one code."""

import pytest
from rq.timeouts import JobTimeoutException

from scorepool import wire
from scorepool.worker.rq.errors import Crashed, Expired, JobError, Stopped, failure_of


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (wire.Invalid("n: Expected `int`", "n"), "invalid"),
        (JobTimeoutException("late"), "timeout"),
        (Stopped(), "canceled"),
        (Crashed("its worker died 5 times"), "crashed"),
        (Expired(), "expired"),
        (JobError(wire.Failure(code="internal", message="gone")), "internal"),
        (KeyError("prompt"), "internal"),
    ],
)
def test_an_error_gets_its_code_by_its_class(error: BaseException, code: str):
    assert failure_of(error, timeout_s=5).code == code


def test_a_failure_names_the_invalid_field_and_hides_the_text_of_unexpected_errors():
    assert failure_of(wire.Invalid("n: Expected `int`", "n"), None).field == "n"
    assert "5" in failure_of(JobTimeoutException(), 5).message
    assert "secret" not in failure_of(RuntimeError("secret"), None).message
