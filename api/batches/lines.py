"""A line's way: from its text to jobs, and from their ends to an entry of the output or the error file."""

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from scorepool import wire
from scorepool.api.dialects.openai.batch import (
    LINE_ENDPOINTS,
    LINE_TIMEOUT_S,
    Batch,
    BatchOutputLine,
    BatchUsage,
    Line,
    LineError,
    LineResponse,
)
from scorepool.api.dialects.protocol import Context, Endpoint
from scorepool.api.http.errors import ApiError, BadRequest, TooLarge, error_reply, map_field_names
from scorepool.api.repositories import decode
from scorepool.api.state import State
from scorepool.api.submission import job_error, locate

Ending = Literal["expired", "cancelled"]
_HELD = re.compile(rb"([0-9]{1,9})\.([0-9]{1,6})")
LATE_S = 5  # after the batch's own end, at which its jobs end by themselves
_SENTENCES: dict[Ending, str] = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed because the batch was cancelled.",
}


class Ended(NamedTuple):
    """A line that needs nothing more."""

    entry: BatchOutputLine
    usage: BatchUsage | None = None  # of one that succeeded

    @property
    def text(self) -> bytes:
        return wire.encode_json(self.entry) + b"\n"


class LineInProgress(NamedTuple):
    """A line that has jobs. Written as `<number>.<number of jobs>`."""

    number: int
    num_jobs: int

    @classmethod
    def read(cls, field: bytes) -> "LineInProgress | None":
        """None for what nobody of ours wrote."""
        written = _HELD.fullmatch(field)
        return written and cls(int(written[1]), int(written[2]))

    def __str__(self) -> str:
        return f"{self.number}.{self.num_jobs}"

    def job_ids(self, batch_id: str) -> list[str]:
        return [job_id(batch_id, self.number, index) for index in range(self.num_jobs)]


def job_id(batch_id: str, number: int, index: int) -> str:
    """The same whenever and wherever it is asked: a line that is submitted twice is one job."""
    return hashlib.blake2b(f"{batch_id}\0{number}\0{index}".encode(), digest_size=16).hexdigest()


def custom_id_of(text: bytes) -> str:
    line = decode.message(text, Line, "json")
    return line.custom_id if line else ""


class LineCall(NamedTuple):
    """A line's body and the endpoint that it calls."""

    endpoint: Endpoint[Any]
    body: Any
    context: Context

    @classmethod
    def parse(cls, text: bytes, batch: Batch, unique_id: str) -> "LineCall":
        """Parse a line; raise wire.Invalid."""
        endpoint = LINE_ENDPOINTS[batch.endpoint]
        body = endpoint.parse(bytes(wire.parse(text, Line).body))
        if endpoint.is_streamed(body):
            raise wire.Invalid("stream: a line of a batch is not streamed, expected false", "stream")
        return cls(endpoint, body, Context(unique_id=unique_id, timeout_s=LINE_TIMEOUT_S))

    def to_requests(self, batch: Batch) -> list[wire.Request]:
        """Build the jobs, at low priority: synchronous requests come first. They wait for their model if it is away."""
        return [
            msgspec.structs.replace(
                request, priority="low", expires_at=float(batch.expires_at + LATE_S), wait_for_model=True
            )
            for request in self.endpoint.to_requests(self.body, self.context)
        ]

    def to_reply(self, results: Sequence[wire.Result]) -> object:
        return self.endpoint.to_reply(self.body, results, self.context)

    def field_name(self, field: str) -> str:
        return self.endpoint.field_name(self.body, field)


async def accept(parts: State, text: bytes, batch: Batch, unique_id: str) -> list[wire.Request]:
    """Return the jobs of a line. Raise wire.Invalid or ApiError if the line is refused: it ends without a job."""
    call = LineCall.parse(text, batch, unique_id)
    requests = call.to_requests(batch)
    most = min(parts.settings.max_bulk_jobs, parts.settings.max_queue_depth)  # they are queued all or none
    if len(requests) > most:
        raise TooLarge(f"prompt: expected at most {most} prompts, found {len(requests)}", "prompt")
    with map_field_names(call.field_name):
        await parts.admission.check(requests, is_bulk=len(requests) > 1)
    return requests


def refused(text: bytes, error: wire.Invalid | ApiError, unique: str) -> Ended:
    if isinstance(error, wire.Invalid):
        error = BadRequest(error.message, error.field)
    return Ended(_entry(text, unique, error.status, error_reply(error)))


def not_run(text: bytes, ending: Ending, unique: str) -> Ended:
    error = LineError(code=f"batch_{ending}", message=_SENTENCES[ending])
    return Ended(BatchOutputLine(id=f"batch_req_{unique}", custom_id=custom_id_of(text), error=error))


def ended(text: bytes, batch: Batch, jobs: Sequence[wire.Job], ending: Ending | None) -> Ended:
    """Of jobs that have all ended. Raises wire.Invalid where another version understood the line."""
    unique = jobs[0].id
    failed = next((job for job in jobs if job.result is None), None)
    if failed is None:
        results = [job.result for job in jobs if job.result is not None]
        usage = BatchUsage(
            input_tokens=sum(result.usage.prompt_tokens for result in results),
            output_tokens=sum(result.usage.completion_tokens for result in results),
        )
        return Ended(_entry(text, unique, 200, LineCall.parse(text, batch, unique).to_reply(results)), usage)
    assert failed.failure is not None
    if failed.failure.code == "expired":
        return not_run(text, "expired", unique)
    if failed.failure.code == "canceled" and ending is not None:
        return not_run(text, ending, unique)
    call = LineCall.parse(text, batch, unique)
    refusal = locate(job_error(failed, 0), call.to_requests(batch), list(jobs).index(failed))
    refusal.rename_field(call.field_name)
    return Ended(_entry(text, unique, refusal.status, error_reply(refusal)))


def _entry(text: bytes, unique: str, status: int, body: Any) -> BatchOutputLine:
    response = LineResponse(status_code=status, request_id=unique, body=body)
    return BatchOutputLine(id=f"batch_req_{unique}", custom_id=custom_id_of(text), response=response)
