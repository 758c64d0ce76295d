"""Every message that crosses a process boundary, and the codec. Imports msgspec and nothing else.

To add a kind of job: a Struct in `request.py`, a line in `Request`, a branch in `worker/translate.py`.
"""

from wire.codec import Invalid, decode_outcome, decode_request, encode, encode_json, parse
from wire.columns import Floats
from wire.endpoint import Endpoint, is_public, literal_address
from wire.event import Event, EventData, TestData
from wire.keys import DELIVER, DONE, INFER, WEBHOOKS, Keys, queue_name, queue_names
from wire.outbox import DELIVERY_KEPT_S, OUTBOX
from wire.reply import Accepted, ErrorBody, ErrorReply, Job, JobPage, ModelCard, ModelList, Status
from wire.request import Generate, Message, Priority, Request, Score, ScoreItem, Submission
from wire.result import Failure, FailureCode, Outcome, Result, Scored, Stamp, Usage
from wire.settings import Settings, SettingsError, parse_model
from wire.webhook import (
    ALL_EVENTS,
    Change,
    Delivery,
    DeliveryAttempt,
    DeliveryPage,
    DeliveryState,
    Registration,
    Replay,
    Replayed,
    SigningSecret,
    Subscriber,
    TestEvent,
    WebhookEndpoint,
    WebhookEndpoints,
    WebhookSecret,
)

__all__ = [
    "ALL_EVENTS",
    "DELIVER",
    "DELIVERY_KEPT_S",
    "DONE",
    "INFER",
    "OUTBOX",
    "WEBHOOKS",
    "Accepted",
    "Change",
    "Delivery",
    "DeliveryAttempt",
    "DeliveryPage",
    "DeliveryState",
    "Endpoint",
    "ErrorBody",
    "ErrorReply",
    "Event",
    "EventData",
    "Failure",
    "FailureCode",
    "Floats",
    "Generate",
    "Invalid",
    "Job",
    "JobPage",
    "Keys",
    "Message",
    "ModelCard",
    "ModelList",
    "Outcome",
    "Priority",
    "Registration",
    "Replay",
    "Replayed",
    "Request",
    "Result",
    "Score",
    "ScoreItem",
    "Scored",
    "Settings",
    "SettingsError",
    "SigningSecret",
    "Stamp",
    "Status",
    "Submission",
    "Subscriber",
    "TestData",
    "TestEvent",
    "Usage",
    "WebhookEndpoint",
    "WebhookEndpoints",
    "WebhookSecret",
    "decode_outcome",
    "decode_request",
    "encode",
    "encode_json",
    "is_public",
    "literal_address",
    "parse",
    "parse_model",
    "queue_name",
    "queue_names",
]
