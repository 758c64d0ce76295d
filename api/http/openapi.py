"""The OpenAPI document: FastAPI's paths with schemas from the wire types, and every error answer declared."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
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

Event = tuple[str, Any]  # its name; the type of its data, or the very data
_REF = "#/components/schemas/{name}"
_FLOATS = {
    "type": "array",
    "items": {"type": ["number", "null"]},
    "description": "float32. In msgpack: bin, packed little-endian float32, NaN where there is no value.",
}
_HEADERS = {
    "Idempotency-Key": (
        "The same key with the same body is the same job; with another body it is refused with 409.",
        {"type": "string", "minLength": 1, "maxLength": 255},
    ),
    "Prefer": ("`wait=N`: answer with the ended job if it ends within N seconds.", {"type": "string"}),
}
_REPLY_HEADERS = {
    201: {},
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "Seconds, from how fast the queue moved in the last minute."},
    503: {"Retry-After": "Seconds."},
}

_kinds: dict[str, Any] = {}  # every type that a route mentions, by its repr


def _floats(kind: type) -> dict[str, Any]:
    if kind is wire.Floats:
        return _FLOATS
    raise NotImplementedError(kind)


def _schema(kind: Any) -> dict[str, Any]:
    """A reference, or an inline schema of references. The types behind them reach the document through `install`."""
    _kinds[repr(kind)] = kind
    (schema,), _ = msgspec.json.schema_components([kind], schema_hook=_floats, ref_template=_REF)
    return schema


def _content(kind: Any) -> dict[str, Any]:
    schema = _schema(kind)
    return {media_type: {"schema": schema} for media_type in MEDIA_TYPES.values()}


def _event(name: str, kind: Any) -> dict[str, Any]:
    """As OpenAPI has server-sent events: an object of their fields. One without a name is called `message`."""
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
    """`responses` of a route: types by status, the statuses that carry a wire.ErrorReply, and the events of which 200
    may be a stream."""
    declared: dict[int | str, dict[str, Any]] = {}
    for status, kind in [*replies.items(), *((status, wire.ErrorReply) for status in (*errors, 500))]:
        declared[status] = {"description": HTTPStatus(status).phrase, "content": _content(kind)}
        if named := _REPLY_HEADERS.get(status):
            declared[status]["headers"] = {
                name: {"description": text, "schema": {"type": "string"}} for name, text in named.items()
            }
    if events:
        ok = declared.setdefault(200, {"description": HTTPStatus.OK.phrase, "content": {}})
        ok["content"]["text/event-stream"] = {"schema": {"anyOf": [_event(*event) for event in events]}}
    return declared


def chunks(kind: Any) -> list[Event]:
    """The events of OpenAI's dialect, whose streams end with a word of their own."""
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
    """Replace FastAPI's generator: its 422 never comes (bad parameters are 400), and it knows no msgspec."""

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
    paths.setdefault("components", {})["schemas"] = components
    return paths
