"""Refuse parameters of other servers that this server does not have, or of which it supports one value only. Pure.

Clients send the defaults of the server that they were written for. A default asks for nothing, so it passes; any other
value is refused by the field's name.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from scorepool import wire

ANY: Final = object()  # in a table: every value passes, because the field changes no result
_MAX_DEFAULT_BYTES = 1024  # more than any default has
_MSGPACK_MAPS = {bytes([first]) for first in (*range(0x80, 0x90), 0xDE, 0xDF)}


def check_supported(body: Struct, supported: Mapping[str, object]) -> None:
    """Check that each field is null or has its one supported value; raise ValueError."""
    for name, value in supported.items():
        if getattr(body, name) not in (None, value):
            raise ValueError(f"`{name}` is not supported here, expected {wire.encode_json(value).decode()}")


def without_defaults(
    content: bytes, message_format: wire.Format, defaults: Mapping[str, object], body_type: type
) -> bytes:
    """Return a body without the fields of `defaults` that are null or have their default; unchanged if it has none.

    A name like `sampling_params.regex` is of a field of an object. Fields of `body_type` itself stay. No value is built
    but those of the fields that are left out. Raise wire.Invalid for another value, and for an unknown field.
    """
    by_parent: dict[str, dict[str, object]] = {"": {}}
    for path, default in defaults.items():
        parent, _, name = path.rpartition(".")
        by_parent.setdefault(parent, {})[name] = default
    own = _own_fields(body_type)
    body, is_changed = _drop(content, message_format, by_parent.pop("", {}), own)
    for parent, table in by_parent.items():
        value = getattr(body, parent)
        if own[parent] is None or not isinstance(value, Raw) or not _is_object(value, message_format):
            continue
        inner, is_inner_changed = _drop(bytes(value), message_format, table, _own_fields(own[parent]), f"{parent}.")
        if is_inner_changed:
            is_changed = True
            setattr(body, parent, Raw(_encode(inner, message_format)))
    return _encode(body, message_format) if is_changed else content


def _drop(
    content: bytes,
    message_format: wire.Format,
    defaults: Mapping[str, object],
    own: Mapping[str, type | None],
    prefix: str = "",
) -> tuple[Struct, bool]:
    """Return an object with its fields unread, without those of `defaults`, and whether it had any of them."""
    try:
        body = wire.parse(content, _outline(tuple({**own, **defaults})), message_format)
    except wire.Invalid as error:
        raise wire.Invalid(f"{prefix}{error.message}", error.field and f"{prefix}{error.field}") from None
    given = [name for name in defaults if name not in own and getattr(body, name) is not UNSET]
    for name in given:
        _check_default(bytes(getattr(body, name)), message_format, defaults[name], f"{prefix}{name}")
        setattr(body, name, UNSET)
    return body, bool(given)


def _check_default(value: bytes, message_format: wire.Format, default: object, path: str) -> None:
    """Check that the value of a field is null or its default; raise wire.Invalid."""
    if default is ANY:
        return
    if len(value) <= _MAX_DEFAULT_BYTES:
        found: object = wire.parse(value, Any, message_format)
        if found is None or _is_equal(found, default):
            return
        shown = wire.quote(found)
    else:
        shown = f"a value of {len(value)} bytes"
    expected = "null" if default is None else f"{wire.encode_json(default).decode()} or null"
    raise wire.Invalid(f"{path}: not supported here, expected {expected}, found {shown}", path)


@cache
def _outline(names: tuple[str, ...]) -> type[Struct]:
    """Return the type of an object with these fields and no others, each left unread."""
    fields = [(name, Raw | UnsetType, UNSET) for name in names]
    return msgspec.defstruct("Outline", fields, forbid_unknown_fields=True)


@cache
def _own_fields(body_type: type) -> Mapping[str, type | None]:
    """Return the names of a struct's fields, each with the struct that is the field's type, if it is one or null."""
    info = msgspec.inspect.type_info(body_type)
    assert isinstance(info, msgspec.inspect.StructType)
    return {field.encode_name: _struct_of(field.type) for field in info.fields}


def _struct_of(node: msgspec.inspect.Type) -> type | None:
    match node:
        case msgspec.inspect.StructType(cls=struct):
            return struct
        case msgspec.inspect.UnionType(types=types):
            return next(filter(None, map(_struct_of, types)), None)
        case _:
            return None


def _is_object(value: Raw, message_format: wire.Format) -> bool:
    """True if the value is an object. Others are left to the type of the body, which names the field."""
    first = bytes(value).lstrip()[:1] if message_format == "json" else bytes(value)[:1]
    return first == b"{" if message_format == "json" else first in _MSGPACK_MAPS


def _encode(body: Struct, message_format: wire.Format) -> bytes:
    return wire.encode_json(body) if message_format == "json" else wire.encode(body)


def _is_equal(value: object, default: object) -> bool:
    """True if the values are equal as JSON: 1 is not true."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)
