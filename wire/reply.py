"""What the API answers, besides outcomes."""

from typing import Literal

from msgspec import Struct

from scorepool.wire.request import Kind
from scorepool.wire.result import Failure, Provenance, Result

Status = Literal["queued", "started", "finished", "failed", "canceled"]


class Accepted(Struct, frozen=True, kw_only=True):
    """The job is in Redis: from here on it ends in a result or a failure."""

    id: str
    status: Status
    location: str


class Job(Struct, frozen=True, kw_only=True):
    """`result` is set when status is finished, `failure` when failed or canceled. Times are seconds since 1970.

    `kind` and `created_at` are null where the queue's record was damaged.
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
    """Newest first, without results. Pass `next_cursor` as `cursor` for the page that follows; null ends the list."""

    jobs: list[Job]
    next_cursor: str | None = None


class ServedModel(Struct, frozen=True, kw_only=True):
    """What one live worker serves. It is written into Redis by the worker and expires with it."""

    id: str
    stamp: Provenance
    context_length: int
    vocab_size: int
    self_test: str  # "passed", or what the engine does about what failed
    worker: str
    aliases: list[str] = []  # other names under which it is asked for
    created: int = 0  # unix, s: when the worker had loaded it
    tokenizer: "TokenizerInfo | None" = None  # left out of lists: see `GET /tokenizer_info`


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """What a client that builds prompts needs to know."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


class Model(Struct, frozen=True, kw_only=True):
    """A served name, with the fields that clients of OpenAI and of vLLM read."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "scorepool"
    root: str  # the name on the results' stamps; another than `id` where that is an alias
    max_model_len: int  # the widest of its workers' contexts, in tokens


class ModelList(Struct, frozen=True, kw_only=True):
    """`data` names each model once; `models` says what each of its live workers serves."""

    object: Literal["list"] = "list"
    data: list[Model] = []
    models: list[ServedModel]


class ErrorReply(Struct, frozen=True, kw_only=True):
    """Every answer outside 2xx: OpenAI's error object, so that its clients raise their own errors."""

    error: "ErrorBody"


class ErrorBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    code: str
    message: str
    type: str  # OpenAI's coarse word for the code
    field: str | None = None
    param: str | None = None  # OpenAI's word for `field`
