"""Define batches of messages, and translate them from and to batches of lines. Pure."""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from scorepool import wire
from scorepool.wire.batch import Batch, LineEndpoint

MESSAGES_PATH: LineEndpoint = "/v1/messages"
MAX_REQUESTS = 50_000  # as many as lines of a file
PREFIX, OWN_PREFIX = "msgbatch_", "batch_"


class BatchedMessage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ask for one message of a batch."""

    custom_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$(?!\n)")]
    params: Annotated[Raw, Meta(description="A body of `/v1/messages`, without `stream`.")]


class CreateMessageBatch(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ask for many messages. A request that is refused ends as `errored`; the others run."""

    requests: Annotated[list[BatchedMessage], Meta(min_length=1, max_length=MAX_REQUESTS)]

    def __post_init__(self) -> None:
        known: set[str] = set()
        for index, request in enumerate(self.requests):
            if request.custom_id in known:
                raise ValueError(f"`requests[{index}].custom_id` is the custom_id of an earlier request")
            known.add(request.custom_id)


class BatchedModel(Struct, frozen=True):
    """Read the part of a request's params that is checked before the batch runs."""

    model: str


class MessageBatchCounts(Struct, frozen=True, kw_only=True):
    """Count the requests of a batch, also while it runs."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(Struct, frozen=True, kw_only=True):
    """Show a batch of messages."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: datetime
    ended_at: datetime | None
    expires_at: datetime
    cancel_initiated_at: datetime | None
    archived_at: None = None
    results_url: Annotated[
        str | None, Meta(description="Path of the results, relative to this server. null until the batch has ended.")
    ]


class MessageBatchPage(Struct, frozen=True, kw_only=True):
    """List batches of messages, newest first."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(Struct, frozen=True, kw_only=True):
    """Confirm that a batch and its results are deleted."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


class ResultError(Struct, frozen=True):
    """Read the error of a line that was refused or failed."""

    message: str
    field: str | None = None


class ResultErrorReply(Struct, frozen=True):
    """Read the body of such a line."""

    error: ResultError


class ResultResponse(Struct, frozen=True):
    """Read what a line was answered."""

    status_code: int
    request_id: str
    body: Raw


class ResultLineError(Struct, frozen=True):
    """Read why a line was not run."""

    code: str


class ResultLine(Struct, frozen=True):
    """Read a line of a batch's output file or error file."""

    custom_id: str
    response: ResultResponse | None = None
    error: ResultLineError | None = None


class MessageResult(Struct, frozen=True, kw_only=True):
    """Give the outcome of one request."""

    type: Literal["succeeded", "errored", "canceled", "expired"]
    message: Raw | UnsetType = UNSET
    error: object = UNSET


class MessageResultLine(Struct, frozen=True, kw_only=True):
    """Write one line of the results of a batch."""

    custom_id: str
    result: MessageResult


ToError = Callable[[int, str, str | None, str], object]  # status, message, field, request id -> body of an error


def to_lines(body: CreateMessageBatch) -> Iterator[bytes]:
    """Yield the lines of the file that the requests become."""
    for request in body.requests:
        params = bytes(request.params).replace(b"\n", b" ").replace(b"\r", b" ")  # no string of JSON holds either
        line = {"custom_id": request.custom_id, "method": "POST", "url": MESSAGES_PATH, "body": Raw(params)}
        yield wire.encode_json(line) + b"\n"


def models_of(body: CreateMessageBatch) -> dict[str, int]:
    """Return the models that the requests name, each with the number of its first request. Raises wire.Invalid."""
    models: dict[str, int] = {}
    for index, request in enumerate(body.requests):
        try:
            models.setdefault(wire.parse(bytes(request.params), BatchedModel).model, index)
        except wire.Invalid as error:
            path = f"requests[{index}].params"
            raise wire.Invalid(f"{path}.{error.message}" if error.field else f"{path}: {error.message}", path) from None
    return models


def public_id(batch_id: str) -> str:
    """Return Anthropic's form of a batch's id."""
    return PREFIX + batch_id.removeprefix(OWN_PREFIX)


def own_id(batch_id: str) -> str:
    """Return the server's form of a batch's id; an id of another form stays, and names no batch."""
    return OWN_PREFIX + batch_id.removeprefix(PREFIX) if batch_id.startswith(PREFIX) else PREFIX + batch_id


def to_message_batch(batch: Batch) -> MessageBatch:
    """Show a batch as Anthropic does."""
    ended_at = batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at
    counts = batch.request_counts
    num_canceled, num_expired = counts.cancelled or 0, counts.expired or 0
    num_left = counts.total - counts.completed - counts.failed  # at the end: those of a batch that never began
    shown_id = public_id(batch.id)
    return MessageBatch(
        id=shown_id,
        processing_status="ended" if ended_at else "canceling" if batch.status == "cancelling" else "in_progress",
        request_counts=MessageBatchCounts(
            processing=0 if ended_at else num_left,
            succeeded=counts.completed,
            errored=counts.failed - num_canceled - num_expired + (num_left if batch.status == "failed" else 0),
            canceled=num_canceled + (num_left if batch.status == "cancelled" else 0),
            expired=num_expired + (num_left if batch.status == "expired" else 0),
        ),
        created_at=_time(batch.created_at),
        ended_at=_time(ended_at) if ended_at else None,
        expires_at=_time(batch.expires_at),
        cancel_initiated_at=_time(batch.cancelling_at) if batch.cancelling_at else None,
        results_url=f"{MESSAGES_PATH}/batches/{shown_id}/results" if ended_at else None,
    )


def to_page(batches: Sequence[Batch], has_more: bool) -> MessageBatchPage:
    """Show a page of batches."""
    data = [to_message_batch(batch) for batch in batches]
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    return MessageBatchPage(data=data, has_more=has_more, first_id=first_id, last_id=last_id)


def to_result(line: bytes, to_error: ToError) -> bytes:
    """Translate a line of the output file or the error file."""
    found = wire.parse(line, ResultLine)
    if found.response is None:
        kind: Literal["canceled", "expired"] = (
            "canceled" if found.error is not None and found.error.code == "batch_cancelled" else "expired"
        )
        result = MessageResult(type=kind)
    elif found.response.status_code == 200:
        result = MessageResult(type="succeeded", message=found.response.body)
    else:
        error = wire.parse(bytes(found.response.body), ResultErrorReply).error
        reply = to_error(found.response.status_code, error.message, error.field, found.response.request_id)
        result = MessageResult(type="errored", error=reply)
    return _encode(found.custom_id, result)


def to_result_of_none(line: bytes, batch: Batch, to_error: ToError) -> bytes:
    """Return the result of a line of the input file of a batch that ended before it began."""
    custom_id = wire.parse(line, ResultLine).custom_id
    if batch.status in ("cancelled", "expired"):
        return _encode(custom_id, MessageResult(type="canceled" if batch.status == "cancelled" else "expired"))
    message = batch.errors.data[0].message if batch.errors and batch.errors.data else "the batch failed"
    return _encode(custom_id, MessageResult(type="errored", error=to_error(400, message, None, batch.id)))


def _encode(custom_id: str, result: MessageResult) -> bytes:
    return wire.on_one_line(wire.encode_json(MessageResultLine(custom_id=custom_id, result=result))) + b"\n"


def _time(unix_s: int) -> datetime:
    return datetime.fromtimestamp(unix_s, UTC)
