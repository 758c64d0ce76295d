"""Define the replies of the native API, except outcomes."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from scorepool.wire.embed import Pooling
from scorepool.wire.provenance import Provenance, with_adapter
from scorepool.wire.request import Kind
from scorepool.wire.result import Failure, Result

Status = Literal["queued", "started", "finished", "failed", "canceled"]


NextCursor = Annotated[str | None, Meta(description="Pass it as `cursor` to get the next page. null: no more.")]
MAX_ENDED_JOBS = 100  # of one request that reads those that have ended


class Accepted(Struct, frozen=True, kw_only=True):
    """Confirm that the job is stored in Redis, so that it will end in a result or a failure."""

    id: str
    status: Status
    location: str
    is_replay: Annotated[
        bool, Meta(description="The job existed before: an earlier request had the same Idempotency-Key.")
    ] = False


class Job(Struct, frozen=True, kw_only=True):
    """Show a job. `result` is set if `status` is finished, `failure` if it is failed or canceled.

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
    """List jobs without their results, newest first."""

    jobs: list[Job]
    next_cursor: NextCursor = None


class CrosscheckStatus(Struct, frozen=True, kw_only=True):
    """Show what comparing a worker's score results with those of other workers has found since the worker's start."""

    share: Annotated[float, Meta(description="Share of its score jobs that another worker computes too.")]
    difference: Annotated[
        str | None, Meta(description="The last difference of which no majority of three workers says who is wrong.")
    ] = None
    stopped: Annotated[
        str | None, Meta(description="The reason why the worker takes no more jobs until it is restarted.")
    ] = None


class WorkerLink(Struct, frozen=True, kw_only=True):
    """Show what a worker measures of its link to Redis and of its own speed, and what it derives from that."""

    round_trip_s: Annotated[
        float | None, Meta(description="Seconds of a small exchange with Redis, smoothed. null: not measured yet.")
    ] = None
    upload_bytes_per_s: Annotated[
        float | None,
        Meta(description="Speed of the last large messages to Redis, at most the link's. null: none was sent."),
    ] = None
    jobs_per_s: Annotated[
        float | None, Meta(description="Jobs that it ends per second while it has any. null: none has ended yet.")
    ] = None
    tokens_per_s: Annotated[
        float | None, Meta(description="Tokens of prompts and completions of those jobs, per second.")
    ] = None
    prefetch_jobs: Annotated[
        int,
        Meta(
            description="Jobs that it keeps ahead of those that run: what it ends until Redis answers and in one step."
        ),
    ] = 1
    lease_s: Annotated[
        float,
        Meta(description="Seconds of silence after which others take its jobs: longer while its heartbeats are slow."),
    ]
    drain_s: Annotated[
        float | None, Meta(description="Seconds in which it ends the jobs in flight, at `jobs_per_s`.")
    ] = None


Strain = Literal["heat", "memory", "battery"]


class EngineRates(Struct, frozen=True, kw_only=True):
    """Show what a worker's engine computed in about the last 15 seconds."""

    prompt_tokens_per_s: Annotated[float, Meta(description="Given tokens that went through the model.")]
    cached_tokens_per_s: Annotated[float, Meta(description="Given tokens that a shared prefix had computed before.")]
    scored_tokens_per_s: Annotated[float, Meta(description="Given tokens whose logprob was computed.")]
    generated_tokens_per_s: float
    steps_per_s: float
    busy: Annotated[float, Meta(description="Share of the time in which a step ran, 0 to 1.")]
    step_s: Annotated[float | None, Meta(description="Mean seconds of a step. null: there was none.")] = None
    rows_per_step: Annotated[float | None, Meta(description="Mean sequences in a step. null: there was none.")] = None
    batch_fill: Annotated[
        float | None,
        Meta(
            description="Mean fill of a step, 0 to 1: its tokens of SCOREPOOL_MAX_BATCH_TOKENS, or its "
            "generating sequences of SCOREPOOL_MAX_RUNNING_ROWS, whichever is more. null: there was none."
        ),
    ] = None
    acceptance: Annotated[
        float | None,
        Meta(
            description="Share of the proposed tokens of speculation that were accepted, 0 to 1. null: there was none."
        ),
    ] = None


class EngineLoad(Struct, frozen=True, kw_only=True):
    """Show how full a worker's batch and its memory for KV caches are."""

    running_rows: Annotated[int, Meta(description="Sequences that generate now.")]
    max_running_rows: int
    cached_tokens: Annotated[
        int, Meta(description="Tokens of KV caches: rows times the longest of them, and a prompt that is half way.")
    ]
    max_cached_tokens: Annotated[int, Meta(description="Tokens of KV caches that fit into memory.")]
    prefix_bytes: Annotated[int, Meta(description="Bytes of KV caches of shared prompts, in memory.")] = 0
    prefix_disk_bytes: Annotated[
        int, Meta(description="Bytes of the files that keep such caches, of all models of the machine.")
    ] = 0
    budget: Annotated[float, Meta(description="Share of the batch's tokens and rows that it may use, 0 to 1.")] = 1.0
    strains: Annotated[list[Strain], Meta(description="Reasons why `budget` is below 1: the state of a Mac.")] = []
    is_loaded: Annotated[
        bool, Meta(description="false: the idle worker has dropped its weights, and loads them with its next job.")
    ] = True
    rates: Annotated[
        EngineRates | None, Meta(description="null: the worker has just begun, or is of an older release.")
    ] = None

    @property
    def state(self) -> str:
        """Say what slows the next jobs, for people: `ok` if nothing does."""
        if self.strains:
            return f"slowed to {self.budget:.0%} by {', '.join(self.strains)}"
        return "ok" if self.is_loaded else "idle, its weights dropped"


class Classifier(Struct, frozen=True, kw_only=True):
    """Describe the labels of a model that takes classify jobs."""

    labels: list[str]
    activation: Annotated[
        Literal["softmax", "sigmoid", "none"], Meta(description="Makes `probs` of logits. none: a regression.")
    ]


class ServedAdapter(Struct, frozen=True, kw_only=True):
    """Describe a LoRA adapter that a worker has beside its model."""

    name: str
    fingerprint: Annotated[str, Meta(description="Hash of the adapter's settings and tensors.")]
    path: Annotated[str, Meta(description="The folder on the worker's machine from which it was loaded.")]
    rank: Annotated[int, Meta(description="The highest rank of its layers.")]
    kind: Annotated[str, Meta(description='"lora" or "dora".')] = "lora"

    @property
    def label(self) -> str:
        """Its name in the stamps of results: with the beginning of its fingerprint."""
        return f"{self.name}@{self.fingerprint[:16]}"


class ServedModel(Struct, frozen=True, kw_only=True):
    """Describe what one live worker serves. The worker writes it to Redis, where it expires with the worker."""

    id: str
    stamp: Provenance
    context_length: Annotated[int, Meta(description="Tokens of prompt and answer together.")]
    vocab_size: int
    vocabulary: Annotated[
        str | None,
        Meta(
            description="Digest of the bytes of all token ids, and of how text is encoded: models with the same one "
            "have the same tokens. null: the worker is of an older release."
        ),
    ] = None
    self_test: Annotated[str, Meta(description='"passed", or how the engine works around what failed.')]
    worker: Annotated[str, Meta(description="The worker's name.")]
    aliases: Annotated[list[str], Meta(description="Other names that clients may use.")] = []
    adapters: Annotated[list[ServedAdapter], Meta(description="LoRA adapters, whose names clients may use.")] = []
    created: Annotated[int, Meta(description="Unix time, in seconds, at which the worker had loaded the model.")] = 0
    surveyed: Annotated[
        bool | None,
        Meta(description="True if every setting of the model's type was compared with transformers; null: not known."),
    ] = None
    tokenizer: Annotated["TokenizerInfo | None", Meta(description="Absent from lists: see `GET /tokenizer_info`.")] = (
        None
    )
    classifier: Annotated[
        Classifier | None, Meta(description="null: a language model, which takes score and generate jobs.")
    ] = None
    pooling: Annotated[
        Pooling | None,
        Meta(description="The pooling of its embeddings unless a job says otherwise. null: it makes none."),
    ] = None
    images: Annotated[
        str | None, Meta(description="The family of models whose images it takes. null: it takes no images.")
    ] = None
    images_unsupported: Annotated[
        str | None,
        Meta(
            description="The reason that a model which could take images takes none. null: it takes some, or could not."
        ),
    ] = None
    crosscheck: Annotated[CrosscheckStatus | None, Meta(description="null: it takes no part in crosschecks.")] = None
    load: Annotated[
        EngineLoad | None, Meta(description="State at its last heartbeat. null: the worker is of an older release.")
    ] = None
    link: Annotated[
        WorkerLink | None, Meta(description="State at its last heartbeat. null: the worker is of an older release.")
    ] = None

    def stamp_of(self, name: str) -> Provenance:
        """Return the stamp of results of one of its names, which may be that of an adapter."""
        label = next((adapter.label for adapter in self.adapters if adapter.name == name), None)
        return self.stamp if label is None else with_adapter(self.stamp, label)

    @property
    def adapter_names(self) -> list[str]:
        """The names of its adapters."""
        return [adapter.name for adapter in self.adapters]

    @property
    def names(self) -> list[str]:
        """All names that a request may give as `model`: its own first."""
        return [self.id, *self.aliases, *self.adapter_names]

    @property
    def takes_jobs(self) -> bool:
        """False if a crosscheck has stopped the worker."""
        return self.crosscheck is None or self.crosscheck.stopped is None


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """Give the special tokens and the chat template that a client needs to build prompts."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


class Model(Struct, frozen=True, kw_only=True):
    """Describe a name under which a model is served, with the fields that OpenAI's and vLLM's clients read."""

    id: str
    object: Literal["model"] = "model"
    created: Annotated[int, Meta(description="Unix time, in seconds, at which the first of its workers loaded it.")]
    owned_by: str = "scorepool"
    root: Annotated[
        str, Meta(description="The name in the stamps of results. It differs from `id` if `id` is an alias.")
    ]
    parent: Annotated[str | None, Meta(description="The model of the LoRA adapter `id`. null: `id` is a model.")] = None
    max_model_len: Annotated[int, Meta(description="Tokens of the longest context among its workers.")]


class ModelList(Struct, frozen=True, kw_only=True):
    """List the served models."""

    object: Literal["list"] = "list"
    data: Annotated[list[Model], Meta(description="One entry per name or alias.")] = []
    models: Annotated[list[ServedModel], Meta(description="One entry per live worker.")]


class Ready(Struct, frozen=True):
    """Say that jobs can be accepted."""

    models: Annotated[list[str], Meta(description="Names that live workers serve. It may be empty.")]
    status: Literal["ready"] = "ready"
    unavailable: Annotated[
        list[str] | UnsetType,
        Meta(description="Sentences that say what cannot be used because a Redis server does not answer."),
    ] = UNSET


class ErrorReply(Struct, frozen=True, kw_only=True):
    """Answer outside 2xx with OpenAI's error object, so that OpenAI's SDK raises its own exceptions."""

    error: "ErrorBody"


class ErrorBody(Struct, frozen=True, kw_only=True):
    """Describe the error that a request caused."""

    code: Annotated[str, Meta(description="A constant that programs can compare.")]
    message: Annotated[str, Meta(description="A sentence for people.")]
    type: Annotated[str, Meta(description="OpenAI's type of the error.")]
    field: Annotated[str | None, Meta(description="The field, header or parameter at fault.")] = None
    param: Annotated[str | None, Meta(description="The same under OpenAI's name.")] = None
