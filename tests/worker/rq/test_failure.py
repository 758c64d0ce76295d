"""Every error has one name in the outcome."""

import pytest
from rq.timeouts import JobTimeoutException

from scorepool import wire
from scorepool.engine.errors import ContextLengthExceeded, InvalidRequest, NonFiniteLogits
from scorepool.worker.rq.failure import JobError, explain
from scorepool.worker.rq.in_flight import Crashed, Expired, Stopped


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (wire.Invalid("n: Expected `int`", "n"), "invalid"),
        (InvalidRequest("token 9 is outside the vocabulary"), "invalid"),
        (ContextLengthExceeded("5000 tokens are more than 4096"), "too_long"),
        (NonFiniteLogits("NaN"), "numeric"),
        (JobTimeoutException("late"), "timeout"),
        (Stopped(), "canceled"),
        (Crashed("its worker died 5 times"), "crashed"),
        (Expired(), "expired"),
        (JobError(wire.Failure(code="internal", message="gone")), "internal"),
        (KeyError("prompt"), "internal"),
    ],
)
def test_an_error_is_told_by_its_class(error: BaseException, code: str):
    assert explain(error, timeout_s=5).code == code


def test_a_failure_names_the_field_and_quotes_no_unexpected_error():
    assert explain(wire.Invalid("n: Expected `int`", "n"), None).field == "n"
    assert "5" in explain(JobTimeoutException(), 5).message
    assert "secret" not in explain(RuntimeError("secret"), None).message
