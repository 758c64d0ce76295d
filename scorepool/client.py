"""The Python SDK: submit jobs over HTTP, wait for them and read their results. One class, blocking, msgpack.

ScorepoolError   the API refused a request: HTTP status, code, message, field
JobFailed        the job ended in a failure: its code and message
TimeoutError     the job did not end in time; it goes on
"""

import time
import uuid
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self, TypeVar, Unpack
from urllib.parse import unquote

import httpx

from scorepool import wire
from scorepool.options import GenerateOptions, ScoreOptions

T = TypeVar("T")
Pair = tuple[str, str] | tuple[list[int], list[int]]  # a prompt and a completion, both text or both token ids
MSGPACK = "application/msgpack"
MAX_ATTEMPTS = 6  # with pauses of 0.2 s to 6.4 s: longer than a restart of the API takes on a busy machine
LONG_POLL_S = 60.0
REPLY_TIMEOUT_S = 60.0  # added to the wait that the caller asked for
UNIX = "unix://"
DEFAULT_LIMITS = httpx.Limits()
NO_HEADERS: Mapping[str, str] = {}


class ScorepoolError(Exception):
    """A request that the API refused, with its HTTP status and the API's `code`, `message` and `field`."""

    def __init__(self, status: int, error: wire.ErrorBody) -> None:
        super().__init__(error.message)
        self.status, self.code, self.message, self.field = status, error.code, error.message, error.field


class JobFailed(Exception):
    """A job that ended in a failure."""

    def __init__(self, job_id: str, failure: wire.Failure) -> None:
        super().__init__(f"job {job_id}: {failure.message}")
        self.job_id, self.failure = job_id, failure


class Client:
    """A connection to one API, safe to share between threads.

    Submissions carry an Idempotency-Key. After a lost connection, a 429 or a 503 the client submits again, and the API
    makes no second job.
    """

    def __init__(self, url: str = "http://127.0.0.1:8000", api_key: str | None = None) -> None:
        """Use the API at a URL, or at a unix socket: `unix:///PATH`."""
        headers = {"Accept": MSGPACK, "Content-Type": MSGPACK}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        limits = httpx.Limits(max_connections=None)  # threads that wait must not block threads that submit
        base_url, transport = transport_of(url, limits)
        self._http = httpx.Client(
            base_url=base_url.rstrip("/").removesuffix("/v1"),  # the OpenAI SDK's base_url works too
            headers=headers,
            timeout=REPLY_TIMEOUT_S,
            limits=limits,
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def submit(self, request: wire.Request, *, idempotency_key: str | None = None) -> str:
        """Submit a job and return its id. Raises ScorepoolError."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return self._call(wire.Accepted, "POST", "/v1/jobs", content=wire.encode(request), headers=headers).id

    def submit_many(self, requests: Iterable[wire.Request], *, idempotency_key: str | None = None) -> list[str]:
        """Submit jobs, all or none, and return their ids in the order of `requests`. Raises ScorepoolError."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        body = wire.encode(list(requests))
        jobs = self._call(list[wire.Accepted], "POST", "/v1/jobs/bulk", content=body, headers=headers)
        return [job.id for job in jobs]

    def job(self, job_id: str, *, wait_s: float = 0.0) -> wire.Job:
        """Return the job when it ends, or as it is after `wait_s`. Raises ScorepoolError."""
        return self._call(wire.Job, "GET", f"/v1/jobs/{job_id}", wait_s=wait_s)

    def result(self, job_id: str, *, timeout_s: float | None = None) -> wire.Result:
        """Wait for the job's result. Raises JobFailed, ScorepoolError, or TimeoutError after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            remaining_s = LONG_POLL_S if deadline is None else deadline - time.monotonic()
            job = self.job(job_id, wait_s=max(0.0, min(remaining_s, LONG_POLL_S)))
            if job.result is not None:
                return job.result
            if job.failure is not None:
                raise JobFailed(job_id, job.failure)
            if remaining_s <= 0:
                raise TimeoutError(f"job {job_id} is {job.status} after {timeout_s} s")

    def score(
        self, model: str, items: Iterable[Pair | str | list[int]], **options: Unpack[ScoreOptions]
    ) -> wire.Result:
        """Score (prompt, completion) pairs, or completions of one `prompt`, and wait for the result.

        Options are the fields of `Score`.
        """
        score_items = [
            wire.ScoreItem(prompt=item[0], completion=item[1])
            if isinstance(item, tuple)
            else wire.ScoreItem(completion=item)
            for item in items
        ]
        return self.result(self.submit(wire.Score(model=model, items=score_items, **options)))

    def generate(
        self, model: str, prompt: str | list[int] | None = None, **options: Unpack[GenerateOptions]
    ) -> wire.Result:
        """Continue a prompt, or answer `messages`, and wait for the result. Options are the fields of `Generate`."""
        return self.result(self.submit(wire.Generate(model=model, prompt=prompt, **options)))

    def cancel(self, job_id: str) -> wire.Job:
        """Cancel a queued or running job and return it. Raises ScorepoolError."""
        return self._call(wire.Job, "POST", f"/v1/jobs/{job_id}/cancel")

    def delete(self, job_id: str) -> None:
        """Delete a job that has ended, with its result. Raises ScorepoolError."""
        self._send("DELETE", f"/v1/jobs/{job_id}")

    def models(self) -> list[wire.ServedModel]:
        """Return the models that live workers serve. Raises ScorepoolError."""
        return self._call(wire.ModelList, "GET", "/v1/models").models

    def _call(
        self,
        reply_type: type[T],
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        wait_s: float = 0.0,
    ) -> T:
        """Send a request and decode the reply."""
        reply = self._send(method, path, content=content, headers=headers, wait_s=wait_s)
        return wire.parse(reply.content, reply_type, "msgpack")

    def _send(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        wait_s: float = 0.0,
    ) -> httpx.Response:
        """Send a request until it succeeds, is refused, or MAX_ATTEMPTS is reached."""
        params = {"wait": wait_s} if wait_s else None
        for attempt in range(1, MAX_ATTEMPTS + 1):
            is_last = attempt == MAX_ATTEMPTS
            pause_s = 0.1 * 2**attempt
            try:
                reply = self._http.request(
                    method, path, content=content, headers=headers, params=params, timeout=REPLY_TIMEOUT_S + wait_s
                )
            except httpx.UnsupportedProtocol:  # a wrong URL: trying again cannot help
                raise
            except httpx.TransportError:
                if is_last:
                    raise
            else:
                if reply.is_success:
                    return reply
                if reply.status_code not in (429, 503) or is_last:
                    raise ScorepoolError(reply.status_code, _decode_error(reply))
                pause_s = max(pause_s, _retry_after_s(reply))
            time.sleep(pause_s)
        raise AssertionError("unreachable: the last attempt returns or raises")


def transport_of(url: str, limits: httpx.Limits = DEFAULT_LIMITS) -> tuple[str, httpx.HTTPTransport | None]:
    """Return the base URL and the transport for the API at a URL; no transport but httpx's own unless it is `unix://`."""
    if not url.startswith(UNIX):
        return url, None
    return "http://localhost", httpx.HTTPTransport(uds=unquote(url.removeprefix(UNIX)), limits=limits)


def _retry_after_s(reply: httpx.Response) -> float:
    """Return the Retry-After header in seconds, 0 if it is missing or a date (which a proxy may send)."""
    seconds = reply.headers.get("Retry-After", "")
    return float(seconds) if seconds.isdecimal() else 0.0


def _decode_error(reply: httpx.Response) -> wire.ErrorBody:
    """Decode the API's error, or build one from a reply that another server (a proxy) sent."""
    try:
        return wire.parse(reply.content, wire.ErrorReply, "msgpack").error
    except wire.Invalid:
        return wire.ErrorBody(
            code="unknown", type="server_error", message=f"HTTP {reply.status_code}: {reply.text[:200]}"
        )
