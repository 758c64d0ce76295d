"""Every way in which a request is refused, and the one place where refusals become replies.

To add a refusal: a class here. Routes raise; nothing else in this room builds an error reply.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import ClassVar

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from scorepool import wire
from scorepool.api.http.formats import accepted_format, reply
from scorepool.api.repositories.decode import WrongRedisType
from scorepool.wire.reply import ErrorBody

logger = logging.getLogger(__name__)

METHODS = ("DELETE", "GET", "OPTIONS", "PATCH", "POST", "PUT")
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}  # OpenAI's
REDIS_RETRY_S = 2  # what a client is told to wait when Redis does not answer


class ApiError(Exception):
    """The request is answered with `status` and a wire.ErrorReply. `message` is a sentence for the caller."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"

    def __init__(self, message: str, field: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.headers = headers or {}

    def rename(self, to_param: Callable[[str], str]) -> None:
        """Say the field in the words of a dialect, in which the message begins with it too."""
        if self.field is not None:
            field, self.field = self.field, to_param(self.field)
            if self.message.startswith(f"{field}:"):
                self.message = self.field + self.message.removeprefix(field)


@contextmanager
def told_as(to_param: Callable[[str], str]) -> Iterator[None]:
    """What is refused inside names fields as a dialect does."""
    try:
        yield
    except ApiError as error:
        error.rename(to_param)
        raise


class BadRequest(ApiError):
    status, code = 400, "invalid"


class PromptTooLong(ApiError):
    status, code = 400, "context_length_exceeded"


class Unauthorized(ApiError):
    status, code = 401, "unauthorized"

    def __init__(self, message: str) -> None:
        super().__init__(message, field="Authorization", headers={"WWW-Authenticate": "Bearer"})


class Forbidden(ApiError):
    status, code = 403, "forbidden"


class NotFound(ApiError):
    status, code = 404, "not_found"


class ModelNotServed(ApiError):
    status, code = 404, "model_not_served"


class NotAcceptable(ApiError):
    status, code = 406, "not_acceptable"


class TooSlow(ApiError):
    status, code = 408, "too_slow"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"Connection": "close"})


class Conflict(ApiError):
    status, code = 409, "conflict"


class TooLarge(ApiError):
    """The rest of the body is not read, so the connection cannot be used again."""

    status, code = 413, "too_large"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message, field, headers={"Connection": "close"})


class UnsupportedMedia(ApiError):
    status, code = 415, "unsupported_media_type"


class QueueFull(ApiError):
    status, code = 429, "queue_full"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message, headers={"Retry-After": str(retry_after_s)})


class Failed(ApiError):
    """The job of a synchronous request failed, and not through the request's own fault."""

    status, code = 500, "job_failed"


class Unavailable(ApiError):
    status, code = 503, "unavailable"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"Retry-After": str(REDIS_RETRY_S)})


def unanswered() -> Unavailable:
    """Of Redis. A command that was sent and not answered may still be run."""
    return Unavailable(
        "the queue does not answer, so it is not known whether this request took effect; "
        "send it again, a submission with the same Idempotency-Key"
    )


def error_reply(error: ApiError) -> wire.ErrorReply:
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return wire.ErrorReply(
        error=ErrorBody(code=error.code, message=error.message, type=kind, field=error.field, param=error.field)
    )


def error_response(request: Request, error: ApiError) -> Response:
    body = error_reply(error)
    try:
        form = accepted_format(request.headers.getlist("accept"))
    except ValueError:  # the caller accepts neither form; JSON is the likelier to be read by a person
        form = "json"
    return reply(body, form, error.status, error.headers)


def _methods_of(request: Request) -> list[str]:
    """All that the application's routes take at the request's path."""
    routes = request.app.routes
    scopes = {method: {**request.scope, "method": method} for method in METHODS}
    allowed = [
        method for method, scope in scopes.items() if any(route.matches(scope)[0] == Match.FULL for route in routes)
    ]
    return sorted([*allowed, "HEAD"]) if "GET" in allowed else allowed  # see head.py


def install(app: FastAPI) -> None:
    """Map every exception that leaves a route to a reply."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error_response(request, error)

    @app.exception_handler(wire.Invalid)
    async def invalid(request: Request, error: wire.Invalid) -> Response:
        return error_response(request, BadRequest(error.message, error.field))

    @app.exception_handler(RequestValidationError)
    async def bad_parameter(request: Request, error: RequestValidationError) -> Response:
        """A query parameter that FastAPI could not read."""
        first = error.errors()[0]
        name = str(first["loc"][-1])
        sentence = f"{name}: {first['msg']}, found {str(first['input'])[:80]!r}"
        return error_response(request, BadRequest(sentence, name))

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        """Starlette's own 404 and 405. Its Allow names the methods of one of the path's routes only."""
        detail, headers = error.detail, dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = _methods_of(request)
            headers["Allow"] = ", ".join(allowed)
            detail += f"; expected {', '.join(allowed)}"
        refusal = ApiError(f"{request.method} {request.url.path}: {detail}", headers=headers)
        refusal.status = error.status_code  # type: ignore[misc]
        refusal.code = HTTPStatus(error.status_code).name.lower()  # type: ignore[misc]
        return error_response(request, refusal)

    @app.exception_handler(RedisError)
    async def redis_away(request: Request, error: RedisError) -> Response:
        logger.error("Redis refused %s %s: %r", request.method, request.url.path, error)
        return error_response(request, unanswered())

    @app.exception_handler(WrongRedisType)
    async def foreign(request: Request, error: WrongRedisType) -> Response:
        """Told as away, for nothing that the client did is wrong."""
        logger.error("%s %s met a key of another type than ours: %r", request.method, request.url.path, error)
        return error_response(
            request, Unavailable("what this request would change is damaged; the API's log says where")
        )

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return error_response(request, BadRequest("the body ended early"))  # nobody reads it

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        """A fault of ours. Starlette raises it again after the reply, so the server logs the traceback."""
        return error_response(request, ApiError("a fault of the server; the log of the API has the details"))
