"""Refuse parameters of other servers that this server does not have, or of which it supports one value only. Pure.

Clients send the defaults of the server that they were written for. A default asks for nothing, so it passes; any other
value is refused by the field's name.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from scorepool import wire

ANY: Final = object()  # in a table: every value passes, because the field changes no result


def check_supported(body: Struct, supported: Mapping[str, object]) -> None:
    """Check that each field is null or has its one supported value; raise ValueError."""
    for name, value in supported.items():
        if getattr(body, name) not in (None, value):
            raise ValueError(f"`{name}` is not supported here, expected {wire.encode_json(value).decode()}")


def without_defaults(
    content: bytes, message_format: wire.Format, defaults: Mapping[str, object], body_type: type
) -> bytes:
    """Return a body without the fields of `defaults` that are null or have their default.

    A name like `sampling_params.regex` is of a field of an object. Fields of `body_type` itself stay. Raise
    wire.Invalid for another value. A body that cannot be read without its type is returned unchanged: reading it as
    `body_type` names the field.
    """
    try:
        body: Any = wire.parse(content, Any, message_format)
    except wire.Invalid:
        return content
    if not isinstance(body, dict):
        return content
    own_fields = {field.encode_name for field in msgspec.structs.fields(body_type)}
    for path, default in defaults.items():
        *parents, name = path.split(".")
        parent = body.get(parents[0]) if parents else body
        if not isinstance(parent, dict) or name not in parent or path in own_fields:
            continue
        value = parent.pop(name)
        if default is not ANY and value is not None and not _is_equal(value, default):
            expected = "null" if default is None else f"{wire.encode_json(default).decode()} or null"
            message = f"{path}: not supported here, expected {expected}, found {repr(value)[:80]}"
            raise wire.Invalid(message, path)
    return wire.encode_json(body) if message_format == "json" else wire.encode(body)


def _is_equal(value: object, default: object) -> bool:
    """True if the values are equal as JSON: 1 is not true."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)
