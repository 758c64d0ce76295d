"""Define what a dialect consists of: endpoints, each with five translations and the declaration of its route. Pure.

    bytes ─parse─► body ─to_requests─► jobs ─┬─to_reply──► one reply
                                             └─to_events─► the chunks of a stream

    field_name  the field of a request, in an error, to the field of the body

api/routes/dialects.py runs any Endpoint over HTTP; api/batches runs those of batches on the lines of a file.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

from msgspec import UNSET, Struct, UnsetType

from scorepool import wire
from scorepool.api.dialects.unsupported import without_defaults

StreamEvent = wire.TokenDelta | wire.Job  # a Job has ended with a result


class Context(Struct, frozen=True, kw_only=True):
    """Hold the facts about a request that are not in its body."""

    unique_id: str
    timeout_s: int  # how long each job may run
    created: int  # unix, s: the time that the reply shows
    served_model: wire.ServedModel | None = None  # None for a line of a batch
    encoded_texts: Sequence[list[int]] = ()  # the token ids of `texts_to_encode`
    is_kept: bool = False  # the body is kept with its job, whose id is `unique_id`
    max_top_logprobs: int | UnsetType = UNSET  # what numbers of the body were clamped to, if any was


class Chat(Struct, frozen=True, kw_only=True):
    """Give a chat to encode, as the model's template renders it before an answer."""

    messages: list[wire.Message]
    tools: list[wire.Tool] = []
    chat_template_kwargs: dict[str, Any] = {}


class JobCount(NamedTuple):
    """Count the jobs of a body, for the limit of jobs in one request. An error calls the entries of `field` `noun`."""

    number: int
    field: str = ""
    noun: str = "jobs"


class Previous(NamedTuple):
    """Hold a job that a body continues: what was kept of its own body, and its answer."""

    kept_body: bytes
    result: wire.Result


class ReplyTooLarge(Exception):
    """Report that the reply that the body asks for would be larger than the server sends."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class EventWriter(Protocol):
    """Translate the events of a request's jobs into the chunks of one stream."""

    def add(self, event: StreamEvent) -> Sequence[object]:
        """Return the chunks that follow from an event. Raise Diverged if it contradicts the sent chunks."""

    def end(self) -> Sequence[object]:
        """Return the last chunks. Bytes are sent as they are, other objects as JSON."""


class KeptEvents(Protocol):
    """Translate the events of a kept body's job into the chunks of a stream that several clients may read."""

    def begin(self) -> Sequence[object]:
        """Return the chunks of a job that is in the queue."""

    def add(self, event: StreamEvent) -> Sequence[object]:
        """Return the chunks that follow from tokens, or from the end of the job. Raise Diverged."""


class HasModel(Protocol):
    """Name a model, or None for the only one that is served."""

    @property
    def model(self) -> str | None: ...


Body = TypeVar("Body", bound=HasModel)


class Endpoint(ABC, Generic[Body]):
    """Declare one POST route of a dialect and translate its bodies. Stateless: every method gets the body."""

    name: ClassVar[str]  # with `summary`, `description` and `tag`: those of the operation in /openapi.json
    path: ClassVar[str]
    other_paths: ClassVar[Sequence[str]] = ()  # where the same route is too
    summary: ClassVar[str]
    description: ClassVar[str]
    tag: ClassVar[str] = ""  # empty: the dialect's
    example: ClassVar[Mapping[str, object] | None] = None  # a body to try
    body_type: type[Body]
    reply_type: ClassVar[Any]  # a tuple: any of these types; None: every reply is a stream
    chunk_type: ClassVar[Any] = None  # of a stream; None: the endpoint does not stream
    foreign_fields: ClassVar[Mapping[str, object]] = {}  # fields of other servers, with the defaults that pass
    has_large_replies: ClassVar[bool] = False  # `to_reply` may take a second, so it runs in a thread

    @property
    def body_types(self) -> Any:
        """Return the type of a body; a tuple: any of these."""
        return self.body_type

    def parse(self, body: bytes, message_format: wire.Format = "json") -> Body:
        """Parse a body. A field that only other servers have passes with its default. Raise wire.Invalid."""
        wire.check_free_form(body, self.body_type, message_format)
        try:
            return wire.parse(body, self.body_type, message_format)
        except wire.Invalid:  # the body may have defaults of another server
            stripped = without_defaults(body, message_format, self.foreign_fields, self.body_type)
            if stripped is body:
                raise
        return wire.parse(stripped, self.body_type, message_format)

    def error_form(self, body: bytes, message_format: wire.Format) -> Literal["tgi"] | None:
        """Return the form of the errors of a body, if it is not the one that follows from the path."""
        return None

    def clamp_top_logprobs(self, body: Body, cap: int) -> Body:
        """Return the body with no more top logprobs than the cap: the same object if it has no more.

        The endpoint shows `max_top_logprobs` of the context in its replies. By default nothing is clamped, and more
        than the cap is refused.
        """
        return body

    def job_count(self, body: Body) -> JobCount:
        """Return the number of jobs, and the field that decides it."""
        return JobCount(1)

    def texts_to_encode(self, body: Body, served_model: wire.ServedModel) -> Iterable[str | Chat]:
        """Yield the texts and chats that `to_requests` needs as token ids: a worker encodes them first."""
        return ()

    @abstractmethod
    def to_requests(self, body: Body, context: Context) -> Iterable[wire.Request]:
        """Yield the jobs of a body, built one by one. Raise wire.Invalid, ReplyTooLarge.

        The caller stops where the jobs become too large together: many may have one long field of the body.
        """

    @abstractmethod
    def to_reply(self, body: Body, results: Sequence[wire.Result], context: Context) -> object:
        """Build the reply from the jobs' results, which are in the order of the requests. Raise wire.Invalid."""

    def idempotency_key(self, body: Body) -> str | None:
        """Return the client's name of the request, if it has one: sent again, the body gets the same jobs."""
        return None

    def kept_body(self, body: Body) -> bytes:
        """Return what is kept with the body's one job, so that its answer can be asked for again; empty for nothing."""
        return b""

    def previous_jobs(self, body: Body) -> Mapping[str, str]:
        """Return the ids of the jobs whose answers the body continues or shows, with its fields that name them.

        Raise wire.Invalid.
        """
        return {}

    def continued(self, body: Body, previous: Mapping[str, Previous]) -> Body:
        """Return the body with what it continues, given the jobs that it named. Raise wire.Invalid."""
        raise NotImplementedError

    def is_in_background(self, body: Body) -> bool:
        """True if the reply comes before the answer: see `to_kept_reply`."""
        return False

    def to_kept_reply(self, body: Body, job: wire.Job) -> object:
        """Build the reply to a body whose job has not ended."""
        raise NotImplementedError

    def to_kept_events(self, body: Body, job: wire.Job) -> "KeptEvents":
        """Return the writer of a stream of a body in the background, whose job goes on without its client."""
        raise NotImplementedError

    def is_streamed(self, body: Body) -> bool:
        """True if the reply is a stream of server-sent events."""
        return False

    def to_events(self, body: Body, job_ids: Sequence[str], context: Context) -> EventWriter:
        """Return the writer of a streamed reply. The jobs are in the order of the requests."""
        raise NotImplementedError

    def to_error_event(self, writer: EventWriter | KeptEvents, reply: object) -> bytes | None:
        """Return the event of an error that ends a stream, given its reply; None if it is the event's data as it is."""
        return None

    def field_name(self, body: Body, field: str) -> str:
        """Map a field of the requests to a field of the body: `[1].prompt[0]` if there are several requests."""
        return field


class Dialect(Struct, frozen=True, kw_only=True):
    """Declare the routes of another server's API."""

    tag: str  # the tag of its routes in /openapi.json
    endpoints: tuple[Endpoint[Any], ...]
    error_codes: dict[str, str] = {}  # the dialect's names of error codes, by our names
    # Of its errors and streams (api/http/error_forms.py). `openai_or_tgi`: `error_form` of the endpoint decides.
    form: Literal["openai", "anthropic", "tgi", "openai_or_tgi"] = "openai"
