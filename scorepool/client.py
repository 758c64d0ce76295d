"""The Python SDK: submit jobs, wait for them, read their columns. One class, blocking, over HTTP."""

import time
import uuid
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from scorepool import wire

T = TypeVar("T")
MSGPACK = "application/msgpack"
TRIES = 6  # over 6 s: an API that is started again on a busy machine takes some
LONG_POLL_S = 60.0
REPLY_TIMEOUT_S = 60.0  # beyond the wait that was asked for


class ScorepoolError(Exception):
    """The API refused. `status` is HTTP's; `code`, `message` and `field` are the API's."""

    def __init__(self, status: int, error: Any) -> None:
        super().__init__(error.message)
        self.status, self.code, self.message, self.field = status, error.code, error.message, error.field


class JobFailed(Exception):
    """The job ended in a failure."""

    def __init__(self, job_id: str, failure: wire.Failure) -> None:
        super().__init__(f"job {job_id}: {failure.message}")
        self.job_id, self.failure = job_id, failure


class Client:
    """Speaks msgpack with one API. Safe to share between threads.

    A submission carries an Idempotency-Key, so that it can be tried again after a lost connection, 429 or 503
    without making a second job.
    """

    def __init__(self, url: str = "http://127.0.0.1:8000", api_key: str | None = None) -> None:
        headers = {"Accept": MSGPACK, "Content-Type": MSGPACK}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = httpx.Client(
            base_url=url,
            headers=headers,
            timeout=REPLY_TIMEOUT_S,
            limits=httpx.Limits(max_connections=None),  # threads that wait for jobs must not keep out those that submit
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def submit(self, request: wire.Request, *, idempotency_key: str | None = None) -> str:
        """The job's id. Raises ScorepoolError."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return self._call(wire.Accepted, "POST", "/v1/jobs", content=wire.encode(request), headers=headers).id

    def submit_many(self, requests: Iterable[wire.Request], *, idempotency_key: str | None = None) -> list[str]:
        """The jobs' ids, in the order of `requests`: all are accepted or none. Raises ScorepoolError."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        body = wire.encode(list(requests))
        return [
            job.id for job in self._call(list[wire.Accepted], "POST", "/v1/jobs/bulk", content=body, headers=headers)
        ]

    def job(self, job_id: str, *, wait_s: float = 0.0) -> wire.Job:
        """The job as it is, or as it is when it ends if that is within `wait_s`. Raises ScorepoolError."""
        options: dict[str, Any] = {}
        if wait_s:
            options = {"params": {"wait": wait_s}, "timeout": wait_s + REPLY_TIMEOUT_S}
        return self._call(wire.Job, "GET", f"/v1/jobs/{job_id}", **options)

    def result(self, job_id: str, *, timeout_s: float | None = None) -> wire.Result:
        """Wait for the job. Raises JobFailed, ScorepoolError, or TimeoutError after `timeout_s` (the job goes on)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = LONG_POLL_S if deadline is None else deadline - time.monotonic()
            job = self.job(job_id, wait_s=max(0.0, min(left, LONG_POLL_S)))
            if job.result is not None:
                return job.result
            if job.failure is not None:
                raise JobFailed(job_id, job.failure)
            if left <= 0:
                raise TimeoutError(f"job {job_id} is {job.status} after {timeout_s} s")

    def score(self, model: str, items: Iterable[tuple[Any, Any]], **options: Any) -> wire.Result:
        """Score (prompt, completion) pairs, each both text or both token ids; `options` are wire.Score's fields."""
        pairs = [wire.ScoreItem(prompt=prompt, completion=completion) for prompt, completion in items]
        return self.result(self.submit(wire.Score(model=model, items=pairs, **options)))

    def generate(self, model: str, prompt: str | list[int], **options: Any) -> wire.Result:
        """Continue a prompt; `options` are wire.Generate's fields."""
        return self.result(self.submit(wire.Generate(model=model, prompt=prompt, **options)))

    def cancel(self, job_id: str) -> wire.Job:
        return self._call(wire.Job, "POST", f"/v1/jobs/{job_id}/cancel")

    def delete(self, job_id: str) -> None:
        self._send("DELETE", f"/v1/jobs/{job_id}")

    def models(self) -> list[wire.ServedModel]:
        return self._call(wire.ModelList, "GET", "/v1/models").models

    def _call(self, kind: type[T], method: str, path: str, **options: Any) -> T:
        return wire.parse(self._send(method, path, **options).content, kind, "msgpack")

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        for tries_left in reversed(range(TRIES)):
            pause_s = 0.2 * 2 ** (TRIES - 1 - tries_left)
            try:
                reply = self._http.request(method, path, **options)
            except httpx.UnsupportedProtocol:  # a URL that no second try makes right
                raise
            except httpx.TransportError:
                if not tries_left:
                    raise
            else:
                if reply.is_success:
                    return reply
                if reply.status_code not in (429, 503) or not tries_left:
                    raise ScorepoolError(reply.status_code, _error(reply))
                pause_s = max(pause_s, _retry_after_s(reply))
            time.sleep(pause_s)
        raise AssertionError("unreachable: the last try returns or raises")


def _retry_after_s(reply: httpx.Response) -> float:
    """Ours is in seconds. A date, which a proxy may send, gives no more than the pause that is made anyway."""
    seconds = reply.headers.get("Retry-After", "")
    return float(seconds) if seconds.isdecimal() else 0.0


def _error(reply: httpx.Response) -> wire.ErrorBody:
    """What the API said; where something else answered (a proxy), what that said."""
    try:
        return wire.parse(reply.content, wire.ErrorReply, "msgpack").error
    except wire.Invalid:
        return wire.ErrorBody(
            code="unknown", type="server_error", message=f"HTTP {reply.status_code}: {reply.text[:200]}"
        )
