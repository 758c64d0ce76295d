"""Keep responses: what is kept of a body, what continues it, and how a kept response is shown. Pure.

What is kept has the whole conversation up to its own input, so it can be continued when what it continued is gone.
"""

import re
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.openai.response_object import ResponseError, ResponseObject
from scorepool.api.dialects.openai.responses import ResponseRequest
from scorepool.api.dialects.openai.responses_reply import ResponseWriter, to_response
from scorepool.api.dialects.protocol import StreamEvent
from scorepool.wire.reply import ErrorBody

_ID = re.compile(r"resp_([0-9a-f]{32})")
_STATUSES: dict[wire.Status, Literal["queued", "in_progress", "failed", "cancelled"]] = {
    "queued": "queued",
    "started": "in_progress",
    "failed": "failed",
    "canceled": "cancelled",
}


class DeletedResponse(Struct, frozen=True, kw_only=True):
    """Confirm that a response is deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


def job_id_of(response_id: str) -> str:
    """Return the id of a response's job; for what is no id of a response, one that no job has."""
    match = _ID.fullmatch(response_id)
    return match[1] if match else ""


def kept_body(body: ResponseRequest) -> bytes:
    """Return what is kept of a body; empty if its client asks for nothing to be kept."""
    return b"" if body.store is False else wire.encode(body)


def to_kept_response(body: ResponseRequest, job: wire.Job) -> ResponseObject:
    """Show a kept response in whatever state its job is."""
    created = int(job.created_at or 0)
    if job.result is not None:
        return to_response(body, job.result, job.id, created, is_kept=True)
    response = ResponseWriter(body, job.id, created, is_kept=True).unanswered()
    error = None
    if job.status == "failed" and job.failure is not None:
        is_invalid = job.failure.code in ("invalid", "too_long")
        error = ResponseError(code="invalid_prompt" if is_invalid else "server_error", message=job.failure.message)
    return replace(response, status=_STATUSES.get(job.status, "failed"), error=error)


class KeptResponseEvents:
    """Write the events of a response that runs in the background: for each client the same, with the same numbers."""

    def __init__(self, body: ResponseRequest, job: wire.Job, after: int = -1) -> None:
        """Leave out the events up to number `after`."""
        self._body, self._num_left_out = body, after + 1
        self._writer = ResponseWriter(body, job.id, int(job.created_at or 0), is_kept=True, is_by_token=True)

    def begin(self) -> Sequence[object]:
        """Return the events of a response in the queue."""
        return self._wanted(self._writer.queued())

    def add(self, event: StreamEvent) -> Sequence[object]:
        """Return the events of tokens, or those of a job that has ended. Raise Diverged."""
        if isinstance(event, wire.TokenDelta):
            return self._wanted(self._writer.add(event))
        if event.result is None:
            return self._wanted(self._writer.failed(to_kept_response(self._body, event)))
        return self._wanted(self._writer.add(event) + self._writer.end())

    def error(self, error: ErrorBody) -> bytes:
        """Return the event of an error that ends one client's stream."""
        return self._writer.error(error)

    def _wanted(self, events: list[object]) -> list[object]:
        num_left_out = min(self._num_left_out, len(events))
        self._num_left_out -= num_left_out
        return events[num_left_out:]
