"""Every message that crosses a process boundary, and the codec. Imports msgspec and nothing else.

To add a kind of job: a Struct in `request.py`, a line in `Request`, a branch in `worker/translate.py`.
"""

from wire.codec import Invalid, decode_outcome, decode_request, encode, encode_json, parse
from wire.columns import Floats
from wire.keys import DELIVER, DONE, INFER, WEBHOOKS, Keys, queue_name, queue_names
from wire.reply import Accepted, ErrorBody, ErrorReply, Job, JobPage, ModelCard, ModelList, Status
from wire.request import Generate, Message, Priority, Request, Score, ScoreItem, Submission
from wire.result import Failure, FailureCode, Outcome, Result, Scored, Stamp, Usage
from wire.settings import Settings, SettingsError, parse_model

__all__ = [
    "DELIVER",
    "DONE",
    "INFER",
    "WEBHOOKS",
    "Accepted",
    "ErrorBody",
    "ErrorReply",
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
    "Request",
    "Result",
    "Score",
    "ScoreItem",
    "Scored",
    "Settings",
    "SettingsError",
    "Stamp",
    "Status",
    "Submission",
    "Usage",
    "decode_outcome",
    "decode_request",
    "encode",
    "encode_json",
    "parse",
    "parse_model",
    "queue_name",
    "queue_names",
]
