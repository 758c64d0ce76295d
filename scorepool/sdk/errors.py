"""Define what the SDK raises. Each message names the URL, the job if there is one, and what to do.

ScorepoolError   the API refused a request
JobFailed        the job ended in a failure
JobTimeout       the job did not end in time; it goes on, unless the same call submitted it
BatchTimeout     the batch did not end in time; it goes on
TokensRestarted  the tokens of a stream so far are void
MixedResults     different models or software computed the results of one call
Unreachable      no API answered at the URL
NotScorepool     what answers at the URL is no API of this release
InvalidUrl       the URL can never work
"""

from scorepool import wire

_REMEDIES = {
    401: "give a valid API key: SCOREPOOL_API_KEY in the environment, or Client(url, api_key=...)",
    413: "divide it into several",
    429: "wait until jobs have ended, or submit fewer",
    500: "the API's log says more",
    502: "the proxy does not reach the API: is it running?",
    503: "try again soon; `GET /readyz` says what is missing",
    504: "the proxy waits too short a time for the API",
}
_FAILURE_REMEDIES: dict[wire.FailureCode, str] = {
    "invalid": "change the request",
    "too_long": "shorten it, or divide it into several jobs",
    "numeric": "`scorepool check-model` tests the model's numbers",
    "timeout": "submit it again with a longer `timeout_s`",
    "expired": "submit it again with a later `expires_at`",
    "canceled": "submit it again if it is still wanted",
    "crashed": "the logs of the workers say why",
    "internal": "report it with the worker's log",
    "not_stored": "ask for less, or let the server's operator set SCOREPOOL_RESULT_STORE",
    "weights_gone": "submit it again without `if_weights`, or with the version that serves",
}


def _rebuild(kind: type[BaseException], args: tuple[object, ...], attributes: dict[str, object]) -> BaseException:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class _Picklable(BaseException):
    """An error that another process can receive, although its __init__ takes more than a message."""

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class ScorepoolError(_Picklable, Exception):
    """A request that the API refused, with its HTTP status and the API's `code`, `message` and `field`."""

    def __init__(
        self,
        status: int,
        error: wire.ErrorBody,
        request: str = "",
        job_id: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        """`request` is its method and URL."""
        where = f" ({request}: HTTP {status})" if request else ""
        remedy = _REMEDIES.get(status, "")
        super().__init__(f"{error.message}{where}{'; ' if remedy else ''}{remedy}")
        self.status, self.code, self.message, self.field = status, error.code, error.message, error.field
        self.request, self.job_id, self.retry_after_s = request, job_id, retry_after_s
        self.may_be_done = False  # the request, now or by an attempt before: no reply says what became of it

    def __str__(self) -> str:
        return f"{super().__str__()}; it may have been done" if self.may_be_done else super().__str__()


class JobFailed(_Picklable, Exception):
    """A job that ended in a failure."""

    def __init__(self, job_id: str, failure: wire.Failure, url: str = "") -> None:
        where = f" at {url}" if url else ""
        super().__init__(f"job {job_id}{where}: {failure.message} ({failure.code}); {_FAILURE_REMEDIES[failure.code]}")
        self.job_id, self.failure, self.url = job_id, failure, url


class JobTimeout(_Picklable, TimeoutError):
    """A job that did not end in the time that was given. It goes on, unless the same call submitted it."""

    def __init__(self, job_id: str, status: str, timeout_s: float, url: str = "", *, is_canceled: bool = False) -> None:
        ends = "it is canceled: give more time" if is_canceled else "it goes on: wait longer, or cancel it"
        super().__init__(f"job {job_id} at {url} is {status} after {timeout_s:g} s; {ends}")
        self.job_id, self.status, self.url, self.is_canceled = job_id, status, url, is_canceled


class BatchTimeout(_Picklable, TimeoutError):
    """A batch that did not end in the time that was given. It goes on."""

    def __init__(self, batch: wire.Batch, timeout_s: float, url: str) -> None:
        counts = batch.request_counts
        num_ended = counts.completed + counts.failed
        super().__init__(
            f"batch {batch.id} at {url} is {batch.status} after {timeout_s:g} s, with {num_ended} of {counts.total} "
            "lines ended; it goes on: wait longer, or cancel it"
        )
        self.batch, self.url = batch, url


class TokensRestarted(_Picklable, Exception):
    """A stream of tokens that began again: its worker died, or its weights changed. Forget the tokens so far."""

    def __init__(self, job_id: str, url: str) -> None:
        super().__init__(
            f"job {job_id} at {url} began again, because its worker died or its weights changed: forget the tokens so "
            "far, and iterate again"
        )
        self.job_id, self.url = job_id, url


class MixedResults(ValueError):
    """Results that cannot be joined, because different models or software computed them."""


class Unreachable(_Picklable, ConnectionError):
    """An API that does not answer."""

    def __init__(
        self,
        url: str,
        seconds: float,
        cause: Exception,
        request: str,
        job_id: str | None = None,
        *,
        may_be_done: bool = False,
    ) -> None:
        """`request` is its method and path. `may_be_done`: it was sent, and no reply says what became of it."""
        self.may_be_done = may_be_done and not request.startswith("GET ")
        if self.may_be_done:
            what = "; it may have been done"
        else:
            goes_on = f"; job {job_id} goes on without it" if job_id else ""
            what = f"{goes_on}. Is it running? `scorepool serve` starts one on this machine"
        problem = f"{request}: {type(cause).__name__} {cause}".strip()
        super().__init__(f"no answer from {url} for {seconds:.1f} s ({problem}){what}")
        self.url, self.request, self.job_id = url, request, job_id


class NotScorepool(_Picklable, Exception):
    """A reply that no API of this release sends."""

    def __init__(self, url: str, problem: str, request: str, job_id: str | None = None) -> None:
        """`request` is its method and path."""
        super().__init__(
            f"what answers at {url} is no scorepool API of this release: {problem} ({request}); check the URL, and the "
            "versions of both"
        )
        self.url, self.request, self.job_id = url, request, job_id


class InvalidUrl(_Picklable, ValueError):
    """A URL that can never work."""

    def __init__(self, url: str) -> None:
        super().__init__(f"the URL is {url!r}: expected http://HOST:PORT, https://HOST or unix:///PATH")
        self.url = url


# What calls of the API end in, beside errors of the caller's code.
ERRORS = (ScorepoolError, JobFailed, JobTimeout, BatchTimeout, TokensRestarted, Unreachable, NotScorepool)
