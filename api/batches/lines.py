"""Translate a line of a batch to jobs, and their outcomes to a line of the output or the error file."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from scorepool import wire
from scorepool.api.batches.services import BatchServices
from scorepool.api.dialects.openai.batch import (
    LINE_ENDPOINTS,
    LINE_TIMEOUT_S,
    BatchOutputLine,
    Line,
    LineBeginning,
    LineError,
    LineResponse,
)
from scorepool.api.dialects.protocol import Context, Endpoint
from scorepool.api.http.bodies import Body
from scorepool.api.http.errors import ApiError, BadRequest, building_requests, error_reply, map_field_names
from scorepool.api.repositories import decode
from scorepool.api.submission import error_of_job, name_field
from scorepool.store.server_map import stamp
from scorepool.wire.batch import Batch, BatchUsage

Ending = Literal["expired", "cancelled"]  # why a batch ends before all of its lines were run
EXPIRY_MARGIN_S = 5  # after the batch's own expiry, at which its jobs expire
_IN_PROGRESS = re.compile(rb"([0-9]{1,9})\.([0-9]{1,6})(?:\.([0-9a-f]{4}))?")
_MESSAGES: dict[Ending, str] = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed because the batch was cancelled.",
}


class EndedLine(NamedTuple):
    """Hold a line of the output file, or, without `usage`, of the error file."""

    text: bytes  # as it is written
    usage: BatchUsage | None = None
    ending: Ending | None = None  # why it was not run


class LineInProgress(NamedTuple):
    """Name a line that has jobs, in Redis as `<number>.<number of jobs>`, and `.<tag>` if they are not on home."""

    number: int
    num_jobs: int
    tag: str = ""  # of the server of its jobs, which their ids end with

    @classmethod
    def parse(cls, field: bytes) -> "LineInProgress | None":
        """Parse the name of a line; None if it has another form."""
        match = _IN_PROGRESS.fullmatch(field)
        return match and cls(int(match[1]), int(match[2]), (match[3] or b"").decode())

    def __str__(self) -> str:
        return f"{self.number}.{self.num_jobs}" + (f".{self.tag}" if self.tag else "")

    def job_ids(self, batch_id: str) -> list[str]:
        """Return the ids of the line's jobs."""
        ids = [job_id_of(batch_id, self.number, index) for index in range(self.num_jobs)]
        return [stamp(job_id, self.tag) for job_id in ids]


def job_id_of(batch_id: str, line_number: int, index: int) -> str:
    """Return the same id for every call: a line that is submitted twice is one job."""
    return hashlib.blake2b(f"{batch_id}\0{line_number}\0{index}".encode(), digest_size=16).hexdigest()


def beginning(text: bytes) -> tuple[bytes, ...]:
    """Return what sorts lines by what their prompts begin with, without building their jobs."""
    line = decode.message(text, Line, "json")
    found = decode.message(bytes(line.body), LineBeginning, "json") if line else None
    if found is None:
        return ()
    prompt = (found.instructions, found.system, found.messages, found.input, found.prompt)
    return tuple(map(bytes, (found.model, found.tools, *prompt)))


class LineCall(NamedTuple):
    """Hold a line's body and the endpoint that it calls."""

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
        if endpoint.is_in_background(body):
            raise wire.Invalid(
                "background: a line of a batch is always in the background, expected false", "background"
            )
        for field in endpoint.previous_jobs(body).values():
            raise wire.Invalid(f"{field}: not supported in a line of a batch, send the items in `input`", field)
        return cls(endpoint, body, Context(unique_id=unique_id, timeout_s=LINE_TIMEOUT_S, created=batch.created_at))

    def to_requests(self, batch: Batch) -> Iterator[wire.Request]:
        """Yield the jobs. Their priority is low, so that synchronous requests come first; they wait for their model."""
        for request in self.endpoint.to_requests(self.body, self.context):
            yield msgspec.structs.replace(
                request, priority="low", expires_at=float(batch.expires_at + EXPIRY_MARGIN_S), wait_for_model=True
            )

    def to_reply(self, results: Sequence[wire.Result], created: float | None) -> object:
        """Build the endpoint's reply from the results of the line's jobs, which were created at that time, unix, s."""
        context = self.context if created is None else msgspec.structs.replace(self.context, created=int(created))
        return self.endpoint.to_reply(self.body, results, context)

    def field_name(self, field: str) -> str:
        """Map a field of the jobs to a field of the body."""
        return self.endpoint.field_name(self.body, field)


async def to_jobs(
    services: BatchServices, text: bytes, batch: Batch, unique_id: str
) -> tuple[list[wire.Request], int | None]:
    """Return the jobs of a line, and the index of the server that must answer before they can be checked and queued.

    It is that of their model, or may be; None if all servers that matter answer. Raise wire.Invalid or ApiError if the
    line is refused: it ends without a job.
    """
    call = await Body(batch.id, text, "json").parse(lambda content, _: LineCall.parse(content, batch, unique_id))
    count = call.endpoint.job_count(call.body)
    services.submission.check_count(*count)
    with building_requests(call.field_name):
        requests = await services.submission.build(call.to_requests(batch), count.field)
    unreachable = await services.models.unreachable({request.model for request in requests})
    if unreachable:
        return requests, next(iter(unreachable.values()))
    with map_field_names(call.field_name):
        await services.admission.check(requests, is_bulk=len(requests) > 1)
        for request in requests:
            for field, image in wire.images_of(request):
                if image.url is not None:
                    raise BadRequest(f"{field}: images of lines of batches are not fetched; expected a data URL", field)
    return requests, None


def refused_line(text: bytes, error: wire.Invalid | ApiError, unique_id: str) -> EndedLine:
    """Build the error line of a request that was refused."""
    if isinstance(error, wire.Invalid):
        error = BadRequest(error.message, error.field)
    return EndedLine(_output_line(text, unique_id, error.status, error_reply(error)))


def unexecuted_line(text: bytes, ending: Ending, unique_id: str) -> EndedLine:
    """Build the error line of a request that was not run."""
    error = LineError(code=f"batch_{ending}", message=_MESSAGES[ending])
    line = BatchOutputLine(id=f"batch_req_{unique_id}", custom_id=_custom_id(text), error=error)
    return EndedLine(_encode(line), ending=ending)


def ended_line(text: bytes, batch: Batch, jobs: Sequence[wire.Job], ending: Ending | None) -> EndedLine:
    """Build the output line from jobs that have all ended.

    Raise wire.Invalid or BadRequest if the line is refused: another version accepted it.
    """
    unique_id = jobs[0].id
    results = [job.result for job in jobs if job.result is not None]
    if len(results) == len(jobs):
        reply = LineCall.parse(text, batch, unique_id).to_reply(results, jobs[0].created_at)
        return EndedLine(_output_line(text, unique_id, 200, reply), BatchUsage.of_results(results))
    index, failed = next((index, job) for index, job in enumerate(jobs) if job.result is None)
    assert failed.failure is not None
    if failed.failure.code == "expired":
        return unexecuted_line(text, "expired", unique_id)
    if failed.failure.code == "canceled" and ending is not None:
        return unexecuted_line(text, ending, unique_id)
    call = LineCall.parse(text, batch, unique_id)
    with building_requests(call.field_name):
        requests = list(call.to_requests(batch))
    error = name_field(error_of_job(failed, 0), requests, index)
    error.rename_field(call.field_name)
    return EndedLine(_output_line(text, unique_id, error.status, error_reply(error)))


def _output_line(text: bytes, unique_id: str, status: int, body: Any) -> bytes:
    response = LineResponse(status_code=status, request_id=unique_id, body=body)
    return _encode(BatchOutputLine(id=f"batch_req_{unique_id}", custom_id=_custom_id(text), response=response))


def _encode(output: BatchOutputLine) -> bytes:
    return wire.on_one_line(wire.encode_json(output)) + b"\n"


def _custom_id(text: bytes) -> str:
    line = decode.message(text, Line, "json")
    return line.custom_id if line else ""
