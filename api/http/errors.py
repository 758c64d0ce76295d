"""Define every way in which a request is refused, and map exceptions to replies in one place.

    ApiError                 500 internal
    ├── BadRequest           400 invalid
    ├── PromptTooLong        400 context_length_exceeded
    ├── Unauthorized         401 unauthorized
    ├── Forbidden            403 forbidden
    ├── NotFound             404 not_found
    ├── ModelNotServed       404 model_not_served
    ├── NoRoute              404, 405: Starlette's own refusals
    ├── NotAcceptable        406 not_acceptable
    ├── TooSlow              408 too_slow
    ├── Conflict             409 conflict
    ├── TooLarge             413 too_large
    ├── UnsupportedMedia     415 unsupported_media_type
    ├── QueueFull            429 queue_full
    ├── TooManyUploads       429 too_many_uploads
    ├── TooManyResults       429 too_many_results
    ├── TooManyEvents        429 too_many_events
    ├── Failed               500 job_failed
    └── Unavailable          503 unavailable
        ├── NotReplicated    503 unavailable: the queue has the jobs, but too few of its replicas do
        └── RedisFull        503 redis_full: nothing of the request was done

    raised by a route    ->   reply (see `install`)
    ApiError                  as above
    wire.Invalid              400 invalid; so is a ValueError in `building_requests`
    RequestValidationError    400 invalid
    RedisError                503 unavailable
    anything else             500 internal, with the traceback in the log

To add a refusal, add a class here. Routes raise it; no other module builds an error reply.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from redis.exceptions import OutOfMemoryError, RedisError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from scorepool import wire
from scorepool.api.http.error_forms import AnyErrorReply, anthropic_error, form_of, openai_error, tgi_error
from scorepool.api.http.formats import accepted_format, reply

logger = logging.getLogger(__name__)

METHODS = ("DELETE", "GET", "OPTIONS", "PATCH", "POST", "PUT")
RESULT_RETRY_S = 5  # Retry-After of a large result beside too many others
UPLOAD_RETRY_S = 5  # Retry-After of an upload beside too many others
REDIS_RETRY_S = 2  # Retry-After while Redis does not answer
_QUOTED_FIELD = re.compile(r"`(?P<name>\w+(?:\[\d+\]|\.\w+)*)`")
_EXPECTED = {  # by pydantic's types of errors; it has sentences for the others
    "int_parsing": "expected an integer",
    "float_parsing": "expected a number",
    "bool_parsing": "expected true or false",
    "literal_error": "expected {expected}",
    "greater_than_equal": "expected {ge} or more",
    "less_than_equal": "expected {le} or less",
    "string_too_long": "expected at most {max_length} characters",
}


class ApiError(Exception):
    """Answer the request with `status` and a wire.ErrorReply. `message` is a sentence for the caller."""

    status: int = 500
    code: str = "internal"

    def __init__(self, message: str, field: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.headers = headers or {}

    def rename_field(self, map_field: Callable[[str], str]) -> None:
        """Replace the field's name, also at the start of the message."""
        if self.field is not None:
            field, self.field = self.field, map_field(self.field)
            if self.message.startswith((f"{field}:", f"{field} ")):
                self.message = self.field + self.message.removeprefix(field)


@contextmanager
def map_field_names(map_field: Callable[[str], str]) -> Iterator[None]:
    """Rename the field of every ApiError raised in this context as a dialect names it."""
    try:
        yield
    except ApiError as error:
        error.rename_field(map_field)
        raise


@contextmanager
def map_codes(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the code of every ApiError raised in this context as a dialect names it."""
    try:
        yield
    except ApiError as error:
        error.code = names.get(error.code, error.code)
        raise


class BadRequest(ApiError):
    status, code = 400, "invalid"


@contextmanager
def building_requests(map_field: Callable[[str], str]) -> Iterator[None]:
    """Refuse a body if the type of a request that is built from it in this context refuses a value.

    `map_field` gives the name of a request's field in the body.
    """
    try:
        with map_field_names(map_field):
            yield
    except wire.Invalid:  # it names a field of the body already
        raise
    except ValueError as error:
        logger.debug("a type of requests refuses a value", exc_info=True)  # where a fault of ours would show
        raise _refused_by_type(str(error), map_field) from None


def _refused_by_type(sentence: str, map_field: Callable[[str], str]) -> BadRequest:
    """Build the error from the sentence of a type of requests, which may begin with the name of a field."""
    sentence = _QUOTED_FIELD.sub(lambda quoted: f"`{map_field(quoted['name'])}`", sentence)
    leading = _QUOTED_FIELD.match(sentence)
    if leading is None:
        return BadRequest(sentence)
    return BadRequest(f"{leading['name']}: {sentence[leading.end() :].lstrip(': ')}", leading["name"])


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


class NoRoute(ApiError):
    """Report Starlette's own 404 and 405 in the form of every other error."""

    def __init__(self, status: int, message: str, headers: dict[str, str]) -> None:
        super().__init__(message, headers=headers)
        self.status = status
        self.code = HTTPStatus(status).name.lower()


class NotAcceptable(ApiError):
    status, code = 406, "not_acceptable"


class TooSlow(ApiError):
    status, code = 408, "too_slow"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"Connection": "close"})


class Conflict(ApiError):
    status, code = 409, "conflict"


class TooLarge(ApiError):
    """Close the connection after the reply, because the rest of the body is not read."""

    status, code = 413, "too_large"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message, field, headers={"Connection": "close"})


class UnsupportedMedia(ApiError):
    status, code = 415, "unsupported_media_type"


class QueueFull(ApiError):
    status, code = 429, "queue_full"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message, headers={"Retry-After": str(retry_after_s)})


class TooManyUploads(ApiError):
    status, code = 429, "too_many_uploads"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"Retry-After": str(UPLOAD_RETRY_S), "Connection": "close"})


class TooManyResults(ApiError):
    status, code = 429, "too_many_results"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"Retry-After": str(RESULT_RETRY_S)})


class TooManyEvents(ApiError):
    status, code = 429, "too_many_events"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message, headers={"Retry-After": str(retry_after_s)})


class Failed(ApiError):
    """Report that the job of a synchronous request failed for a reason other than the request itself."""

    status, code = 500, "job_failed"


class Unavailable(ApiError):
    status, code = 503, "unavailable"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"Retry-After": str(REDIS_RETRY_S)})


class NotReplicated(Unavailable):
    """Report jobs that the queue has accepted, but too few of its replicas. `job_ids` are those of all of them."""

    def __init__(self, message: str, job_ids: Sequence[str]) -> None:
        super().__init__(message)
        self.job_ids = job_ids


class RedisFull(Unavailable):
    """Refuse a request of which nothing was done. After another 503, some of it may have been."""

    code = "redis_full"


def redis_full() -> RedisFull:
    """Build the error for a Redis that refused a command because it has no memory left."""
    return RedisFull("Redis has no memory left, so nothing was changed; send the request again later")


def redis_unanswered() -> Unavailable:
    """Build the error for a Redis that did not answer. The command may have run, or may still run."""
    return Unavailable(
        "the queue does not answer, so it is not known whether this request took effect; "
        "send it again, a submission or a batch with the same Idempotency-Key"
    )


def server_stopping() -> Unavailable:
    """Build the error for a request that is not answered because the server stops."""
    return Unavailable("this server stops before the request could be answered; send it again")


def begun_again() -> Failed:
    """Build the error for a job that ran again, so that its stream cannot go on with what comes now."""
    return Failed("the job began again, on another worker or with other weights, so the tokens that were sent are void")


def internal_error() -> ApiError:
    """Build the error for a fault of the server."""
    return ApiError("a fault of the server; the log of the API has the details")


def bad_parameter(error: RequestValidationError) -> BadRequest:
    """Build the error for a parameter of the query or the path that FastAPI could not convert."""
    first = error.errors()[0]
    name = str(first["loc"][1])
    if first["type"] == "missing":
        return BadRequest(f"{name}: it is missing", name)
    expected = _EXPECTED.get(first["type"], first["msg"]).format(**first.get("ctx", {}))
    return BadRequest(f"{name}: {expected}, found {wire.quote(str(first['input']))}", name)


def error_reply(error: ApiError) -> wire.ErrorReply:
    """Build the body of an error in OpenAI's form."""
    return openai_error(error.status, error.code, error.message, error.field)


def error_reply_to(request: Request, error: ApiError) -> AnyErrorReply:
    """Build the body of an error in the form of the request's route, or of its body."""
    match request.scope.get("error_form") or form_of(request.url.path):
        case "anthropic":
            return anthropic_error(error.status, error.message, error.field, request_id(request))
        case "tgi":
            return tgi_error(error.status, error.message)
        case _:
            return error_reply(error)


def error_response(request: Request, error: ApiError) -> Response:
    """Build the reply in the format that the request accepts; JSON if it accepts neither format."""
    body = error_reply_to(request, error)
    try:
        reply_format = accepted_format(request.headers.getlist("accept"))
    except ValueError:
        reply_format = "json"
    return reply(body, reply_format, error.status, error.headers)


def request_id(request: Request) -> str:
    """Return the `x-request-id` of the reply (see middleware.RequestId); "-" outside of the application."""
    return str(request.scope.get("state", {}).get("request_id", "-"))


def _allowed_methods(request: Request) -> list[str]:
    """List all methods that the application's routes accept at the request's path."""
    routes = request.app.routes
    scopes = {method: {**request.scope, "method": method} for method in METHODS}
    allowed = [
        method for method, scope in scopes.items() if any(route.matches(scope)[0] == Match.FULL for route in routes)
    ]
    return sorted([*allowed, "HEAD"]) if "GET" in allowed else allowed  # see middleware.HeadAsGet


def install(app: FastAPI, wrong_redis_type: type[RedisError]) -> None:
    """Map every exception that leaves a route to a reply.

    `wrong_redis_type` is raised for a key in Redis whose type is not the expected one.
    """
    _install_request_errors(app)

    @app.exception_handler(RedisError)
    async def on_redis_error(request: Request, error: RedisError) -> Response:
        _log(request, f"Redis failed: {type(error).__name__}: {error}")
        is_full = isinstance(error, OutOfMemoryError)
        return error_response(request, redis_full() if is_full else redis_unanswered())

    @app.exception_handler(wrong_redis_type)
    async def on_wrong_redis_type(request: Request, error: RedisError) -> Response:
        """Answer 503, not 4xx: the client did nothing wrong."""
        _log(request, f"a key in Redis has an unexpected type: {error!r}")
        return error_response(
            request, Unavailable("what this request would change is damaged; the API's log says where")
        )

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> Response:
        """Answer 500. Starlette raises the exception again after the reply, so the server logs the traceback."""
        _log(request, f"a fault of the server: {error!r}")
        reply = error_response(request, internal_error())
        reply.headers["x-request-id"] = request_id(request)  # this reply is sent outside of all middleware
        return reply


def _install_request_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        if error.status >= 500:
            logger.warning(
                "%s %s %s: %s %s", request_id(request), request.method, request.url.path, error.status, error.code
            )
        return error_response(request, error)

    @app.exception_handler(wire.Invalid)
    async def on_invalid(request: Request, error: wire.Invalid) -> Response:
        return error_response(request, BadRequest(error.message, error.field))

    @app.exception_handler(RequestValidationError)
    async def on_bad_parameter(request: Request, error: RequestValidationError) -> Response:
        """Report a query parameter that FastAPI could not convert."""
        return error_response(request, bad_parameter(error))

    @app.exception_handler(HTTPException)
    async def on_no_route(request: Request, error: HTTPException) -> Response:
        """Complete the `Allow` header of a 405: Starlette names the methods of one route only."""
        detail, headers = error.detail, dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = _allowed_methods(request)
            headers["Allow"] = ", ".join(allowed)
            detail += f"; expected {', '.join(allowed)}"
        if error.status_code == HTTPStatus.NOT_FOUND:
            detail = f"there is no such path; {_nearest_path(request)}"
        message = f"{request.method} {wire.cut(request.url.path)}: {detail}"
        return error_response(request, NoRoute(error.status_code, message, headers))

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return error_response(request, BadRequest("the body ended early"))  # nobody reads it


def _nearest_path(request: Request) -> str:
    path = f"/v1{request.url.path}"
    scope = dict(request.scope) | {"path": path}
    if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
        return f"expected {wire.cut(path)}: a base URL for OpenAI's clients ends in /v1"
    return "GET /openapi.json lists all"


def _log(request: Request, text: str) -> None:
    logger.error("%s %s %s: %s", request_id(request), request.method, request.url.path, text)
