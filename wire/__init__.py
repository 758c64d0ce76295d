"""Every message that crosses a process boundary, and the codec. Imports msgspec and nothing else.

To add a kind of job: a Struct in `request.py`, a line in `Request`, branches in `worker/translate.py` and
`worker/report.py`.
"""

from wire.codec import Invalid, decode_outcome, decode_request, encode, encode_json, parse
from wire.columns import Floats
from wire.endpoint import Endpoint, is_public, literal_address
from wire.event import Event, EventData
from wire.growth import Growth, Step
from wire.keys import DELIVER, DONE, INFER, TOKENS, WEBHOOKS, Keys, queue_name, queue_names
from wire.reply import (
    Accepted,
    ErrorBody,
    ErrorReply,
    Job,
    JobPage,
    Model,
    ModelCard,
    ModelList,
    Status,
    TokenizerInfo,
)
from wire.request import (
    Generate,
    Kind,
    Message,
    Priority,
    Request,
    Score,
    ScoreItem,
    Submission,
    Tokenize,
    ToolCall,
    kind_of,
)
from wire.result import Failure, FailureCode, Outcome, Result, Scored, Stamp, Usage
from wire.settings import Settings, SettingsError, parse_model

__all__ = [
    "DELIVER",
    "DONE",
    "INFER",
    "TOKENS",
    "WEBHOOKS",
    "Accepted",
    "Endpoint",
    "ErrorBody",
    "ErrorReply",
    "Event",
    "EventData",
    "Failure",
    "FailureCode",
    "Floats",
    "Generate",
    "Growth",
    "Invalid",
    "Job",
    "JobPage",
    "Keys",
    "Kind",
    "Message",
    "Model",
    "ModelCard",
    "ModelList",
    "Outcome",
    "Priority",
    "Request",
    "Result",
    "Score",
    "ScoreItem",
    "Scored",
    "Settings",
    "SettingsError",
    "Stamp",
    "Status",
    "Step",
    "Submission",
    "Tokenize",
    "TokenizerInfo",
    "ToolCall",
    "Usage",
    "decode_outcome",
    "decode_request",
    "encode",
    "encode_json",
    "is_public",
    "kind_of",
    "literal_address",
    "parse",
    "parse_model",
    "queue_name",
    "queue_names",
]
