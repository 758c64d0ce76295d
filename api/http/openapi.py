"""Build the OpenAPI document: FastAPI's paths, schemas of the wire types, and every error answer."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from inspect import cleandoc
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from scorepool import wire
from scorepool.api.http.formats import MEDIA_TYPES

try:
    VERSION = version("scorepool")
except PackageNotFoundError:  # a checkout that is not installed
    VERSION = "0"

Event = tuple[str, Any]  # its name; the type of its data, or the data itself
_REF = "#/components/schemas/{name}"
_FLOATS = {
    "type": "array",
    "items": {"type": ["number", "null"]},
    "description": "float32. In msgpack: bin, packed little-endian float32, NaN for a missing value.",
}
_HEADERS = {
    "Idempotency-Key": (
        "The same key with the same body names the same job. With another body it is refused with 409.",
        {"type": "string", "minLength": 1, "maxLength": 255},
    ),
    "Prefer": ("`wait=N`: wait up to N seconds, and answer with the job if it has ended.", {"type": "string"}),
}
_EVERY_REPLY = {"x-request-id": "The id that the request gave, or a new one. The server's log repeats it for errors."}
_REPLY_HEADERS: dict[int, dict[str, str]] = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "Seconds, estimated from how many jobs ended in the last minute."},
    503: {"Retry-After": "Seconds."},
}

_kinds: dict[str, Any] = {}  # every type that a route mentions, by its repr


def _floats(kind: type) -> dict[str, Any]:
    if kind is wire.Floats:
        return _FLOATS
    raise NotImplementedError(kind)


def _schema(kind: Any) -> dict[str, Any]:
    """Return a reference, or an inline schema of references. `install` adds the types themselves to the document."""
    _kinds[repr(kind)] = kind
    (schema,), _ = msgspec.json.schema_components([kind], schema_hook=_floats, ref_template=_REF)
    return schema


def _content(kind: Any) -> dict[str, Any]:
    schema = _schema(kind)
    return {media_type: {"schema": schema} for media_type in MEDIA_TYPES.values()}


def _event(name: str, kind: Any) -> dict[str, Any]:
    """Describe a server-sent event as an object of its fields. An event without a name is called `message`."""
    data: dict[str, Any] = {"const": kind}
    if not isinstance(kind, str):
        data = {"contentMediaType": "application/json", "contentSchema": _schema(kind)}
    return {
        "type": "object",
        "properties": {"event": {"const": name}, "data": {"type": "string", **data}},
        "required": ["event", "data"],
    }


def answers(
    replies: Mapping[int, Any], errors: Sequence[int], events: Sequence[Event] = ()
) -> dict[int | str, dict[str, Any]]:
    """Build the `responses` of a route: types by status, statuses with a wire.ErrorReply, the events of a stream."""
    declared: dict[int | str, dict[str, Any]] = {}
    for status, kind in [*replies.items(), *((status, wire.ErrorReply) for status in (*errors, 500))]:
        declared[status] = {"description": HTTPStatus(status).phrase, "content": _content(kind)}
        declared[status]["headers"] = {
            name: {"description": text, "schema": {"type": "string"}}
            for name, text in (_EVERY_REPLY | _REPLY_HEADERS.get(status, {})).items()
        }
    if events:
        ok = declared.setdefault(200, {"description": HTTPStatus.OK.phrase, "content": {}})
        ok["content"]["text/event-stream"] = {"schema": {"anyOf": [_event(*event) for event in events]}}
    return declared


def chunks(kind: Any) -> list[Event]:
    """List the events of a stream in OpenAI's dialect, which ends with `[DONE]`."""
    return [("message", kind), ("message", wire.ErrorReply), ("message", "[DONE]")]


def body(kind: Any) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": _content(kind)}}


def headers(*names: str) -> dict[str, Any]:
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
    _, components = msgspec.json.schema_components(list(_kinds.values()), schema_hook=_floats, ref_template=_REF)
    for schema in components.values():
        if "description" in schema:
            schema["description"] = cleandoc(schema["description"])
    paths.setdefault("components", {})["schemas"] = components
    return paths
