"""Build the OpenAPI document: FastAPI's paths, schemas of the wire types, and every error answer."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from inspect import cleandoc
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from scorepool import wire
from scorepool.api.http.error_forms import ERROR_TYPES, DeclaredForm
from scorepool.api.http.formats import MEDIA_TYPES

try:
    VERSION = version("scorepool")
except PackageNotFoundError:  # a checkout that is not installed
    VERSION = "0"

SseEvent = tuple[str, Any]  # the name of an event; the type of its data, or the data itself
_REF = "#/components/schemas/{name}"
_FLOATS = {
    "type": "array",
    "items": {"type": ["number", "null"]},
    "description": "float32. In msgpack: bin, packed little-endian float32, NaN for a missing value.",
}
_HEADERS = {
    "Idempotency-Key": (
        "The same key with the same body names the same job or batch. With another body it is refused with 409.",
        {"type": "string", "minLength": 1, "maxLength": 255},
    ),
    "Prefer": ("`wait=N`: wait up to N seconds, and answer with the job if it has ended.", {"type": "string"}),
}
_EVERY_REPLY = {"x-request-id": "The id that the request gave, or a new one. The server's log repeats it for errors."}
_REPLY_HEADERS: dict[int, dict[str, str]] = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "Seconds; of a full queue, estimated from how many jobs ended in the last minute."},
    503: {"Retry-After": "Seconds."},
}

_types: dict[str, Any] = {}  # every type that a route of any application in this process declares, by its repr
_references: dict[str, dict[str, Any]] = {}  # what `_schema` returns for them


def _floats(message_type: type) -> dict[str, Any]:
    if message_type is wire.Floats:
        return _FLOATS
    raise NotImplementedError(message_type)


def _schema(message_type: Any) -> dict[str, Any]:
    """Return a reference to the type's schema, or an inline schema of references. `_document` adds the schemas.

    A tuple of types stands for any of them: msgspec has no union of structs without a tag.
    """
    if isinstance(message_type, tuple):
        return {"anyOf": [_schema(each) for each in message_type]}
    name = repr(message_type)
    if name not in _references:  # routes declare the same few types hundreds of times
        _types[name] = message_type
        (schema,), _ = msgspec.json.schema_components([message_type], schema_hook=_floats, ref_template=_REF)
        _references[name] = schema
    return deepcopy(_references[name])


def _content(message_type: Any) -> dict[str, Any]:
    schema = _schema(message_type)
    return {media_type: {"schema": schema} for media_type in MEDIA_TYPES.values()}


def _event(name: str, message_type: Any) -> dict[str, Any]:
    """Describe a server-sent event as an object of its fields. An event without a name is called `message`."""
    data: dict[str, Any] = {"const": message_type}
    if not isinstance(message_type, str):
        data = {"contentMediaType": "application/json", "contentSchema": _schema(message_type)}
    return {
        "type": "object",
        "properties": {"event": {"const": name}, "data": {"type": "string", **data}},
        "required": ["event", "data"],
    }


def responses(
    replies: Mapping[int, Any], errors: Sequence[int], events: Sequence[SseEvent] = (), form: DeclaredForm = "openai"
) -> dict[int | str, dict[str, Any]]:
    """Build the `responses` of a route: types by status, statuses of errors in this form, the events of a stream."""
    declared: dict[int | str, dict[str, Any]] = {}
    for status, message_type in [*replies.items(), *((status, ERROR_TYPES[form]) for status in (*errors, 500))]:
        declared[status] = {"description": HTTPStatus(status).phrase, "content": _content(message_type)}
        declared[status]["headers"] = {
            name: {"description": text, "schema": {"type": "string"}}
            for name, text in (_EVERY_REPLY | _REPLY_HEADERS.get(status, {})).items()
        }
    if events:
        ok = declared.setdefault(200, {"description": HTTPStatus.OK.phrase, "content": {}})
        ok["content"]["text/event-stream"] = {"schema": {"anyOf": [_event(*event) for event in events]}}
    return declared


def stream_events(message_type: Any, form: DeclaredForm = "openai") -> list[SseEvent]:
    """List the events of a stream. OpenAI's ends with `[DONE]`, Anthropic's have the `type` of their data as names."""
    if form == "anthropic":
        return [("message", message_type), ("error", ERROR_TYPES[form])]
    if form == "tgi":
        return [("message", message_type), ("message", ERROR_TYPES[form])]
    return [("message", message_type), ("message", wire.ErrorReply), ("message", "[DONE]")]


def request_body(
    message_type: Any, example: Any = None, formats: Sequence[wire.Format] = ("json", "msgpack")
) -> dict[str, Any]:
    """Build the part of an operation that declares its body. The example is what a reader sends first."""
    content = {MEDIA_TYPES[each]: {"schema": _schema(message_type)} for each in formats}
    if example is not None:
        content[MEDIA_TYPES["json"]]["example"] = example
    return {"requestBody": {"required": True, "content": content}}


def request_headers(*names: str) -> dict[str, Any]:
    """Build the part of an operation that declares the headers it reads."""
    return {
        "parameters": [
            {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
            for name, (text, schema) in ((name, _HEADERS[name]) for name in names)
        ]
    }


def install(app: FastAPI) -> None:
    """Replace FastAPI's generator, which knows no msgspec and declares a 422 that is never sent."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _webhook(summary: str, message_type: Any) -> dict[str, Any]:
    """Describe a POST that receivers of webhooks get."""
    content = {"application/json": {"schema": _schema(message_type)}}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "responses": {
                "2XX": {"description": "Received. 410 disables the endpoint; any other answer is tried again."}
            },
        }
    }


def _document(app: FastAPI) -> dict[str, Any]:
    paths = get_openapi(
        title=app.title,
        version=app.version,
        summary="Asynchronous LLM scoring: per-token logprobs of given or generated text.",
        routes=app.routes,
    )
    for path in paths["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    paths["webhooks"] = {
        "job": _webhook("A job ended", wire.JobEvent),
        "batch": _webhook("A batch ended", wire.BatchEvent),
        "test": _webhook("An endpoint is tested", wire.TestEvent),
    }
    _, components = msgspec.json.schema_components(list(_types.values()), schema_hook=_floats, ref_template=_REF)
    for schema in components.values():
        if "description" in schema:
            schema["description"] = cleandoc(schema["description"])
    paths.setdefault("components", {}).pop("schemas", None)  # of the 422
    described: set[str] = set()  # what this application uses: `_types` has those of others in this process
    pending: list[Any] = [paths]
    while pending:
        for name in references(pending.pop()):
            if name not in described:
                described.add(name)
                pending.append(components[name])
    paths["components"]["schemas"] = {name: components[name] for name in components if name in described}
    return paths


def references(node: Any) -> Iterator[str]:
    """Yield the names of the schemas that a part of a document refers to, in their order."""
    if isinstance(node, dict):
        if isinstance(reference := node.get("$ref"), str):
            yield reference.rpartition("/")[2]
        node = list(node.values())
    if isinstance(node, list):
        for value in node:
            yield from references(value)
