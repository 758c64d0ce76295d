"""Encode errors in the form that the clients of a route read: OpenAI's, Anthropic's, text-generation-inference's.

Anthropic's follows from the path, `/v1/messages` and below, so that a request which no route takes gets it too. On
`/generate` the last one follows from the body, which an endpoint has read (`scope["error_form"]`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from scorepool import wire
from scorepool.wire.reply import ErrorBody

Form = Literal["openai", "anthropic", "tgi"]
DeclaredForm = Form | Literal["openai_or_tgi"]
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = OPENAI_TYPES | {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
ANTHROPIC_PATH = "/v1/messages"
# Codes by which Anthropic's SDK sees what it can leave out, by the field that was refused.
ANTHROPIC_CODES = {"thread": "thread_unsupported_request"}


class AnthropicErrorDetails(Struct, frozen=True, kw_only=True):
    """Tell Anthropic's SDK what to leave out when it sends the request again."""

    error_code: str


class AnthropicError(Struct, frozen=True, kw_only=True):
    """Describe the error that a request caused."""

    type: Annotated[str, Meta(description="Anthropic's type of the error.")]
    message: Annotated[str, Meta(description="A sentence for people, which begins with the field at fault.")]
    details: Annotated[
        AnthropicErrorDetails | UnsetType, Meta(description="Present if `thread` was refused: send all messages.")
    ] = UNSET


class AnthropicErrorReply(Struct, frozen=True, kw_only=True):
    """Answer outside 2xx with Anthropic's error object, so that Anthropic's SDK raises its own exceptions."""

    type: Literal["error"] = "error"
    error: AnthropicError
    request_id: Annotated[str, Meta(description="The `x-request-id` of the reply, which the server's log repeats.")]


class TextGenerationErrorReply(Struct, frozen=True, kw_only=True):
    """Answer outside 2xx as text-generation-inference does, so that its clients raise their own exceptions."""

    error: Annotated[str, Meta(description="A sentence for people, which begins with the field at fault.")]
    error_type: Literal["validation", "generation", "overloaded"]


AnyErrorReply = wire.ErrorReply | AnthropicErrorReply | TextGenerationErrorReply
ERROR_TYPES: Mapping[DeclaredForm, Any] = {
    "openai": wire.ErrorReply,
    "anthropic": AnthropicErrorReply,
    "tgi": TextGenerationErrorReply,
    "openai_or_tgi": (wire.ErrorReply, TextGenerationErrorReply),
}
_TGI_PATHS = ("/", "/generate_stream", "/info")


def form_of(path: str) -> Form:
    """Return the form of errors at a path."""
    if path in _TGI_PATHS:
        return "tgi"
    return "anthropic" if path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/") else "openai"


def openai_error(status: int, code: str, message: str, field: str | None) -> wire.ErrorReply:
    """Build the body of an error in OpenAI's form."""
    openai_type = OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return wire.ErrorReply(error=ErrorBody(code=code, message=message, type=openai_type, field=field, param=field))


def anthropic_error(status: int, message: str, field: str | None, request_id: str) -> AnthropicErrorReply:
    """Build the body of an error in Anthropic's form."""
    error_type = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    code = ANTHROPIC_CODES.get(field or "")
    details = AnthropicErrorDetails(error_code=code) if code else UNSET
    error = AnthropicError(type=error_type, message=message, details=details)
    return AnthropicErrorReply(error=error, request_id=request_id)


def tgi_error(status: int, message: str) -> TextGenerationErrorReply:
    """Build the body of an error in text-generation-inference's form."""
    if status in (429, 503):
        return TextGenerationErrorReply(error=message, error_type="overloaded")
    return TextGenerationErrorReply(error=message, error_type="generation" if status >= 500 else "validation")
