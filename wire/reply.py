"""What the API answers, besides outcomes."""

from typing import Literal

from msgspec import Struct

from wire.result import Failure, Result, Stamp

Status = Literal["queued", "started", "finished", "failed", "canceled"]


class Accepted(Struct, frozen=True, kw_only=True):
    """The job is in Redis: from here on it ends in a result or a failure."""

    id: str
    status: Status
    location: str


class Job(Struct, frozen=True, kw_only=True):
    """`result` is set when status is finished, `failure` when failed or canceled. Times are seconds since 1970."""

    id: str
    kind: Literal["score", "generate"]
    model: str
    status: Status
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    result: Result | None = None
    failure: Failure | None = None


class JobPage(Struct, frozen=True, kw_only=True):
    """Newest first, without results. Pass `next_cursor` as `cursor` for the page that follows; null ends the list."""

    jobs: list[Job]
    next_cursor: str | None = None


class ModelCard(Struct, frozen=True, kw_only=True):
    """What one live worker serves. It is written into Redis by the worker and expires with it."""

    id: str
    stamp: Stamp
    context_length: int
    vocab_size: int
    self_test: str  # "passed", or what the engine does about what failed
    worker: str


class ModelList(Struct, frozen=True, kw_only=True):
    models: list[ModelCard]


class ErrorReply(Struct, frozen=True, kw_only=True):
    """Every answer outside 2xx of the native routes."""

    error: "ErrorBody"


class ErrorBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    code: str
    message: str
    field: str | None = None
