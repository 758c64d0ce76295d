"""Messages that cross a process boundary, and their codec. Imports msgspec only.

    request.py        jobs, as clients submit them       result.py         outcomes of jobs
    reply.py          replies of the native API          token_delta.py    tokens of running jobs
    webhook.py        endpoints and deliveries           webhook_event.py  payloads of deliveries
    columns.py        per-token columns                  codec.py          JSON and msgpack

To add a kind of job, change these places: a Struct in `request.py` and its names in `Request` and `Kind`; the limits
in `api/admission.py`; the translation in `worker/inference/translate.py` and `worker/inference/result.py`; the names
that `scorepool/__init__.py` exports.
"""

from scorepool.wire.codec import Invalid, decode_outcome, decode_request, encode, encode_json, parse
from scorepool.wire.columns import Floats, StreamedColumns
from scorepool.wire.reply import (
    Accepted,
    ErrorBody,
    ErrorReply,
    Job,
    JobPage,
    Model,
    ModelList,
    ServedModel,
    Status,
    TokenizerInfo,
)
from scorepool.wire.request import (
    Generate,
    Kind,
    Message,
    Priority,
    Request,
    Score,
    ScoreItem,
    Submission,
    Tokenize,
    Tool,
    ToolCall,
    kind_of,
)
from scorepool.wire.result import (
    Channel,
    Failure,
    FailureCode,
    Outcome,
    Provenance,
    Result,
    SequenceResult,
    ToolCallResult,
    Usage,
)
from scorepool.wire.token_delta import TokenDelta, TokenDeltas
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
    ReplayReply,
    ReplayRequest,
    SigningSecret,
    Subscriber,
    TestEventRequest,
    WebhookEndpoint,
    WebhookEndpointList,
    WebhookSecret,
)
from scorepool.wire.webhook_event import BatchEvent, BatchEventData, JobEvent, JobEventData, TestEventData

__all__ = [
    "ALL_EVENTS",
    "Accepted",
    "BatchEnd",
    "BatchEvent",
    "BatchEventData",
    "BatchEventType",
    "Channel",
    "Delivery",
    "DeliveryAttempt",
    "DeliveryPage",
    "DeliveryState",
    "EndpointChange",
    "EndpointRegistration",
    "ErrorBody",
    "ErrorReply",
    "Failure",
    "FailureCode",
    "Floats",
    "Generate",
    "Invalid",
    "Job",
    "JobEvent",
    "JobEventData",
    "JobPage",
    "Kind",
    "Message",
    "Model",
    "ModelList",
    "Outcome",
    "Priority",
    "Provenance",
    "ReplayReply",
    "ReplayRequest",
    "Request",
    "Result",
    "Score",
    "ScoreItem",
    "SequenceResult",
    "ServedModel",
    "SigningSecret",
    "Status",
    "StreamedColumns",
    "Submission",
    "Subscriber",
    "TestEventData",
    "TestEventRequest",
    "TokenDelta",
    "TokenDeltas",
    "Tokenize",
    "TokenizerInfo",
    "Tool",
    "ToolCall",
    "ToolCallResult",
    "Usage",
    "WebhookEndpoint",
    "WebhookEndpointList",
    "WebhookSecret",
    "decode_outcome",
    "decode_request",
    "encode",
    "encode_json",
    "kind_of",
    "parse",
]
