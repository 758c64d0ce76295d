"""Bytes to messages and back. Codecs are built once; JSON and msgpack carry the same structs."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import inspect

from scorepool.wire.columns import Floats
from scorepool.wire.request import Request
from scorepool.wire.result import Outcome

T = TypeVar("T")
Format = Literal["json", "msgpack"]


class Invalid(ValueError):
    """The bytes are not the message that was expected. `field` is a path like `items[0].prompt`, or None."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


def _to_msgpack(value: object) -> bytes:
    if isinstance(value, Floats):
        return value.pack()
    raise NotImplementedError(f"cannot write {type(value).__name__}")


def _to_json(value: object) -> list[float | None]:
    if isinstance(value, Floats):
        return value.values()
    raise NotImplementedError(f"cannot write {type(value).__name__}")


def _to_floats(kind: type, value: Any) -> Any:
    if kind is Floats:
        return Floats.unpack(value) if isinstance(value, bytes) else Floats(value)
    raise NotImplementedError(f"cannot read {kind.__name__}")


_msgpack = msgspec.msgpack.Encoder(enc_hook=_to_msgpack)
_json = msgspec.json.Encoder(enc_hook=_to_json)


@cache
def _decoder(kind: Any, form: Format) -> Any:
    module = msgspec.json if form == "json" else msgspec.msgpack
    return module.Decoder(kind, dec_hook=_to_floats)


def encode(message: object) -> bytes:
    """As msgpack: the form in which messages lie in Redis."""
    return _msgpack.encode(message)


def encode_json(message: object) -> bytes:
    return _json.encode(message)


def parse(body: bytes, kind: type[T], form: Format = "json") -> T:
    """Raises Invalid, which names the field, the value found there and what was expected."""
    try:
        return _decoder(kind, form).decode(body)  # type: ignore[no-any-return,arg-type]
    except msgspec.ValidationError as error:
        raise _explain(error, body, kind, form) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"the body is not valid {form}: {error}") from None


# msgspec names the place in the text alone: `... field `x` - at `$.items[0]``.
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*)`$")
_NAMED_FIELD = re.compile(r"(?:unknown|required) field `(?P<name>[^`]*)`")
_NO_CHOICE = re.compile(r"Invalid (?:enum )?value")  # and not a word on which would be right
_RULE = re.compile(r"`(?P<name>\w+)`(?! and `)")  # a message's own sentence begins with the field that is to be changed
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")  # of a path: a field's name, or an index
_MAX_SHOWN = 80  # characters of what the caller sent


def _explain(error: msgspec.ValidationError, body: bytes, kind: Any, form: Format) -> Invalid:
    """Split msgspec's sentence into field and expectation, and add the value that stands there."""
    text = str(error)
    place = _PLACE.search(text)
    field = place["path"] if place else ""
    expectation = text[: place.start()] if place else text
    named = _NAMED_FIELD.search(expectation)
    if named:
        name = _shortened(named["name"])
        field = f"{field}.{name}" if field else name
        return Invalid(f"{field}: {expectation.replace(named['name'], name)}", field)
    if _NO_CHOICE.match(expectation) and (choices := set(_choices(inspect.type_info(kind), _STEP.findall(field)))):
        expectation = f"Expected {' | '.join(map(repr, sorted(choices)))}"
    try:
        found: Any = _decoder(Any, form).decode(body)
        for name, index in _STEP.findall(field):
            found = found[name] if name else found[int(index)]
    except (KeyError, IndexError, TypeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Invalid(f"{field}: {expectation}", field)  # what follows the bad field may be no message at all
    rule = _RULE.match(expectation)
    if rule and isinstance(found, dict) and rule["name"] in found:
        field, found = f"{field}.{rule['name']}".removeprefix("."), found[rule["name"]]
    if not field:
        return Invalid(expectation)
    return Invalid(f"{field}: {expectation}, found {_shortened(repr(found))}", field)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _choices(node: inspect.Type, steps: Sequence[tuple[str, str]]) -> Iterator[str]:
    """What may stand at a place below a type: the values of a Literal, or the tags of a union."""
    match node:
        case inspect.Metadata(type=inner):
            yield from _choices(inner, steps)
        case inspect.UnionType(types=types):
            for inner in types:
                yield from _choices(inner, steps)
        case inspect.ListType(item_type=inner) if steps and steps[0][1]:
            yield from _choices(inner, steps[1:])
        case inspect.LiteralType(values=values) if not steps:
            yield from map(str, values)
        case inspect.StructType() if steps:
            name = steps[0][0]
            if [(name, "")] == [*steps] and node.tag_field == name:
                yield str(node.tag)
            for field in node.fields:
                if field.encode_name == name:
                    yield from _choices(field.type, steps[1:])


def decode_request(body: bytes) -> Request:
    """From Redis. Raises Invalid."""
    return parse(body, Request, "msgpack")  # type: ignore[arg-type]


def decode_outcome(body: bytes) -> Outcome:
    """From Redis. Raises Invalid."""
    return parse(body, Outcome, "msgpack")  # type: ignore[arg-type]
