"""Define the lines of the files of batches. Pure.

To add an endpoint to batches, add its path to wire.LineEndpoint and the endpoint to LINE_ENDPOINTS.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from scorepool.api.dialects.anthropic.endpoints import MESSAGES
from scorepool.api.dialects.openai.endpoints import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES
from scorepool.api.dialects.protocol import Endpoint
from scorepool.wire.batch import LineEndpoint
from scorepool.wire.request_fields import ModelName

MAX_LINES = 50_000
LINE_TIMEOUT_S = 3600  # of one job of a line


class Line(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Read one line of an input file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: LineEndpoint
    body: msgspec.Raw


class LineModel(Struct, frozen=True):
    """Read the part of a line's body that is checked before the batch runs."""

    model: ModelName


class LineBeginning(Struct, frozen=True):
    """Read what the prompt of a line's body begins with, as it is spelled: chat templates put tools before messages."""

    model: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


class LineResponse(Struct, frozen=True, kw_only=True):
    """Answer a line that was run, or that was refused."""

    status_code: int
    request_id: Annotated[str, Meta(description="Id of the line's first job.")]
    body: Any


class LineError(Struct, frozen=True, kw_only=True):
    """Say why a line was not run."""

    code: str
    message: str


class BatchOutputLine(Struct, frozen=True, kw_only=True):
    """Write one line of an output file (status 200) or of an error file (every other outcome)."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None


LINE_ENDPOINTS: dict[LineEndpoint, Endpoint[Any]] = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/embeddings": EMBEDDINGS,
}
