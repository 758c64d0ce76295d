"""Replies of the native API, except outcomes."""

from typing import Literal

from msgspec import Struct

from scorepool.wire.request import Kind
from scorepool.wire.result import Failure, Provenance, Result

Status = Literal["queued", "started", "finished", "failed", "canceled"]


class Accepted(Struct, frozen=True, kw_only=True):
    """The job is stored in Redis, so it will end in a result or a failure."""

    id: str
    status: Status
    location: str


class Job(Struct, frozen=True, kw_only=True):
    """A job. `result` is set if `status` is finished, `failure` if it is failed or canceled.

    Times are in seconds since 1970. `kind` and `created_at` are null if the job's record in the queue is damaged.
    """

    id: str
    kind: Kind | None
    model: str
    status: Status
    created_at: float | None
    started_at: float | None = None
    ended_at: float | None = None
    result: Result | None = None
    failure: Failure | None = None


class JobPage(Struct, frozen=True, kw_only=True):
    """Jobs without their results, newest first. Pass `next_cursor` as `cursor` to get the next page; null: no more."""

    jobs: list[Job]
    next_cursor: str | None = None


class ServedModel(Struct, frozen=True, kw_only=True):
    """The model that one live worker serves. The worker writes it to Redis, where it expires with the worker."""

    id: str
    stamp: Provenance
    context_length: int
    vocab_size: int
    self_test: str  # "passed", or how the engine works around what failed
    worker: str
    aliases: list[str] = []  # other names that clients may use
    created: int = 0  # Unix time, s, at which the worker had loaded it
    tokenizer: "TokenizerInfo | None" = None  # absent from lists; see `GET /tokenizer_info`


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """The special tokens and the chat template that a client needs to build prompts."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


class Model(Struct, frozen=True, kw_only=True):
    """A served model name, with the fields that OpenAI's and vLLM's clients read."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "scorepool"
    root: str  # the name in the stamps of results; differs from `id` if `id` is an alias
    max_model_len: int  # in tokens; the largest context among its workers


class ModelList(Struct, frozen=True, kw_only=True):
    """The served models. `data` lists each name once; `models` has one entry per live worker."""

    object: Literal["list"] = "list"
    data: list[Model] = []
    models: list[ServedModel]


class ErrorReply(Struct, frozen=True, kw_only=True):
    """The body of every answer outside 2xx: OpenAI's error object, so that OpenAI's SDK raises its own exceptions."""

    error: "ErrorBody"


class ErrorBody(Struct, frozen=True, kw_only=True):
    """The error that a request caused."""

    code: str
    message: str
    type: str  # OpenAI's error type for the code
    field: str | None = None
    param: str | None = None  # OpenAI's name for `field`
