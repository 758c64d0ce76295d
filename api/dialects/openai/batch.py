"""OpenAI's batch objects, and the lines of their files. Pure.

To add an endpoint to batches: its path in LineEndpoint, and the endpoint in LINE_ENDPOINTS.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from scorepool.api.dialects.openai.endpoints import CHAT, COMPLETIONS
from scorepool.api.dialects.openai.files import FILE_KEPT_S, ExpiresAfter
from scorepool.api.dialects.openai.sampling import Metadata
from scorepool.api.dialects.protocol import Endpoint
from scorepool.wire.request import ModelName

MAX_LINES = 50_000
LINE_TIMEOUT_S = 3600  # of one job of a line

LineEndpoint = Literal["/v1/completions", "/v1/chat/completions"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
_UNITS_S = {"m": 60, "h": 3600, "d": 86_400}


class CreateBatch(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    input_file_id: Annotated[str, Meta(min_length=1, max_length=64)]
    endpoint: LineEndpoint
    completion_window: Annotated[
        str, Meta(pattern=r"^[1-9][0-9]{0,2}[mhd]$(?!\n)", description="24h as at OpenAI, or 30m, 7d, ...")
    ]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None

    def __post_init__(self) -> None:
        if self.window_s > FILE_KEPT_S:
            raise ValueError("`completion_window` is at most 30d")

    @property
    def window_s(self) -> int:
        return int(self.completion_window[:-1]) * _UNITS_S[self.completion_window[-1]]


class BatchError(Struct, frozen=True, kw_only=True):
    code: str
    message: str
    line: int | None = None  # from 1
    param: str | None = None


class BatchErrors(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(Struct, frozen=True, kw_only=True):
    """`failed` counts every line of the error file, also lines that were not run in time."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0


class Batch(Struct, frozen=True, kw_only=True):
    """Times are whole seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: LineEndpoint
    model: str | None = None  # if all lines name the same
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage = BatchUsage()
    metadata: dict[str, str] | None = None


class BatchPage(Struct, frozen=True, kw_only=True):
    """Newest first. Pass `last_id` as `after` for the page that follows."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Line(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of an input file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: LineEndpoint
    body: msgspec.Raw


class LineModel(Struct, frozen=True):
    """The part of a line's body that is checked before the batch runs."""

    model: ModelName


class LineResponse(Struct, frozen=True, kw_only=True):
    status_code: int
    request_id: str  # the id of the line's first job
    body: Any


class LineError(Struct, frozen=True, kw_only=True):
    code: str
    message: str


class BatchOutputLine(Struct, frozen=True, kw_only=True):
    """One line of an output file (status 200) or of an error file (every other outcome)."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None


LINE_ENDPOINTS: dict[LineEndpoint, Endpoint[Any]] = {"/v1/completions": COMPLETIONS, "/v1/chat/completions": CHAT}
