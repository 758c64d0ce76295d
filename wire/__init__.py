"""Define the messages that cross a process boundary, and their codec. Imports msgspec only.

    request.py        jobs, as clients submit them: score.py, generate.py, chat.py, classify.py, embed.py, tokenize.py,
                      on submission.py; the types of their fields are in request_fields.py
    result.py         outcomes of jobs                   provenance.py     what computed them
    reply.py          replies of the native API          token_delta.py    tokens of running jobs
    webhook.py        endpoints and deliveries           webhook_event.py  payloads of deliveries
    columns.py        per-token columns                   codec.py          JSON and msgpack
    file.py           files of batches                   batch.py          batches
    quote.py          values in errors                    free_form.py      sizes of schemas and arguments
    weights.py        versions of a model's weights
    comparison.py     two computations of one sequence   crosscheck.py     messages between workers that compare
    progress.py       how far running jobs are           model_comparison.py  how far two models are apart
    cached.py         entries of the result cache        adapter.py        adapters that come and go
    image.py          images of requests                 image_header.py   their formats and sizes
    checkpoint.py     finished rows of running jobs      compared.py       what compare jobs find

To add a kind of job, change these places: a `Submission` in a module of its own, and its names in `Request` and `Kind`
of `request.py`; the limits in `api/admission.py`; the translation in `worker/inference/translate.py` and
`worker/inference/result.py`; the names that `scorepool/__init__.py` exports.
"""

from scorepool.wire.adapter import AdapterRecord, AdapterReport, LoadAdapter, UnloadAdapter
from scorepool.wire.batch import (
    Batch,
    BatchError,
    BatchErrors,
    BatchPage,
    BatchStatus,
    BatchUsage,
    CreateBatch,
    LineEndpoint,
    RequestCounts,
)
from scorepool.wire.cached import CachedSequence
from scorepool.wire.chat import Message, Tool, ToolCall
from scorepool.wire.checkpoint import CheckpointRow
from scorepool.wire.classify import Classify, ClassifyItem
from scorepool.wire.codec import (
    Format,
    Invalid,
    check_free_form,
    convert,
    count_objects,
    decode_outcome,
    decode_request,
    encode,
    encode_json,
    on_one_line,
    parse,
)
from scorepool.wire.columns import Floats, LogprobsMode, StreamedColumns
from scorepool.wire.compared import ComparedSequence, Divergence, ModelComparison
from scorepool.wire.comparison import (
    Comparison,
    ScoredSequence,
    TokenDifference,
    are_of_one_model,
    compare,
    join_stamps,
    rounding_nats,
    stamp_differences,
    tolerance_nats,
)
from scorepool.wire.crosscheck import Computation, Crosscheck, CrosscheckMessage, CrosscheckNotice
from scorepool.wire.embed import Embed, EmbedItem, Pooling
from scorepool.wire.file import DeletedFile, ExpiresAfter, FileObject, FilePage, Purpose
from scorepool.wire.generate import Generate, SamplingOptions, mode_conflict
from scorepool.wire.image import Image
from scorepool.wire.model_comparison import divergence, join_comparisons
from scorepool.wire.packed import PackedColumns, join_packed
from scorepool.wire.progress import Progress, Progresses
from scorepool.wire.provenance import Provenance, Usage, Verification, weights_of
from scorepool.wire.quote import cut, quote
from scorepool.wire.reply import (
    MAX_ENDED_JOBS,
    Accepted,
    Classifier,
    CrosscheckStatus,
    EngineLoad,
    EngineRates,
    ErrorBody,
    ErrorReply,
    Job,
    JobPage,
    Model,
    ModelList,
    Ready,
    ServedAdapter,
    ServedModel,
    Status,
    Strain,
    TokenizerInfo,
    WorkerLink,
)
from scorepool.wire.request import (
    Kind,
    Request,
    images_of,
    kind_of,
    map_images,
    report_excess,
    with_bases,
    with_top_k,
)
from scorepool.wire.request_fields import Priority
from scorepool.wire.result import (
    Channel,
    Classification,
    DraftLogprob,
    Embedding,
    Failure,
    FailureCode,
    Outcome,
    Result,
    SequenceResult,
    ToolCallResult,
    map_failures,
)
from scorepool.wire.score import Compare, Score, ScoreItem, base_job_id
from scorepool.wire.submission import Submission
from scorepool.wire.token_delta import MissingTokens, TokenDelta, TokenDeltas
from scorepool.wire.tokenize import Tokenize
from scorepool.wire.webhook import (
    ALL_EVENTS,
    BatchEnd,
    BatchEventType,
    Delivery,
    DeliveryAttempt,
    DeliveryPage,
    DeliveryState,
    EndpointChange,
    EndpointRegistration,
    EventType,
    JobWebhookSecret,
    ReplayReply,
    ReplayRequest,
    SecretRotation,
    SigningSecret,
    Subscriber,
    TestEventRequest,
    WebhookEndpoint,
    WebhookEndpointList,
    WebhookSecret,
)
from scorepool.wire.webhook_event import BatchEvent, BatchEventData, JobEvent, JobEventData, TestEvent, TestEventData
from scorepool.wire.weights import OnRunning, PushWeights, WeightsSource, WeightsState, WorkerWeights

__all__ = [
    "ALL_EVENTS",
    "MAX_ENDED_JOBS",
    "Accepted",
    "AdapterRecord",
    "AdapterReport",
    "Batch",
    "BatchEnd",
    "BatchError",
    "BatchErrors",
    "BatchEvent",
    "BatchEventData",
    "BatchEventType",
    "BatchPage",
    "BatchStatus",
    "BatchUsage",
    "CachedSequence",
    "Channel",
    "CheckpointRow",
    "Classification",
    "Classifier",
    "Classify",
    "ClassifyItem",
    "Compare",
    "ComparedSequence",
    "Comparison",
    "Computation",
    "CreateBatch",
    "Crosscheck",
    "CrosscheckMessage",
    "CrosscheckNotice",
    "CrosscheckStatus",
    "DeletedFile",
    "Delivery",
    "DeliveryAttempt",
    "DeliveryPage",
    "DeliveryState",
    "Divergence",
    "DraftLogprob",
    "Embed",
    "EmbedItem",
    "Embedding",
    "EndpointChange",
    "EndpointRegistration",
    "EngineLoad",
    "EngineRates",
    "ErrorBody",
    "ErrorReply",
    "EventType",
    "ExpiresAfter",
    "Failure",
    "FailureCode",
    "FileObject",
    "FilePage",
    "Floats",
    "Format",
    "Generate",
    "Image",
    "Invalid",
    "Job",
    "JobEvent",
    "JobEventData",
    "JobPage",
    "JobWebhookSecret",
    "Kind",
    "LineEndpoint",
    "LoadAdapter",
    "LogprobsMode",
    "Message",
    "MissingTokens",
    "Model",
    "ModelComparison",
    "ModelList",
    "OnRunning",
    "Outcome",
    "PackedColumns",
    "Pooling",
    "Priority",
    "Progress",
    "Progresses",
    "Provenance",
    "Purpose",
    "PushWeights",
    "Ready",
    "ReplayReply",
    "ReplayRequest",
    "Request",
    "RequestCounts",
    "Result",
    "SamplingOptions",
    "Score",
    "ScoreItem",
    "ScoredSequence",
    "SecretRotation",
    "SequenceResult",
    "ServedAdapter",
    "ServedModel",
    "SigningSecret",
    "Status",
    "Strain",
    "StreamedColumns",
    "Submission",
    "Subscriber",
    "TestEvent",
    "TestEventData",
    "TestEventRequest",
    "TokenDelta",
    "TokenDeltas",
    "TokenDifference",
    "Tokenize",
    "TokenizerInfo",
    "Tool",
    "ToolCall",
    "ToolCallResult",
    "UnloadAdapter",
    "Usage",
    "Verification",
    "WebhookEndpoint",
    "WebhookEndpointList",
    "WebhookSecret",
    "WeightsSource",
    "WeightsState",
    "WorkerLink",
    "WorkerWeights",
    "are_of_one_model",
    "base_job_id",
    "check_free_form",
    "compare",
    "convert",
    "count_objects",
    "cut",
    "decode_outcome",
    "decode_request",
    "divergence",
    "encode",
    "encode_json",
    "images_of",
    "join_comparisons",
    "join_packed",
    "join_stamps",
    "kind_of",
    "map_failures",
    "map_images",
    "mode_conflict",
    "on_one_line",
    "parse",
    "quote",
    "report_excess",
    "rounding_nats",
    "stamp_differences",
    "tolerance_nats",
    "weights_of",
    "with_bases",
    "with_top_k",
]
