"""Bytes to messages and back. Codecs are built once; JSON and msgpack carry the same structs."""

import re
from functools import cache
from typing import Any, Literal, TypeVar

import msgspec

from wire.columns import Floats
from wire.request import Request
from wire.result import Outcome

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
        raise _explain(error, body, form) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"the body is not valid {form}: {error}") from None


# msgspec names the place in the text alone: `... field `x` - at `$.items[0]``.
_PLACE = re.compile(r" - at `\$\.?(?P<path>.*)`$")
_NAMED_FIELD = re.compile(r"(?:unknown|required) field `(?P<name>[^`]*)`")


def _explain(error: msgspec.ValidationError, body: bytes, form: Format) -> Invalid:
    """Split msgspec's sentence into field and expectation, and add the value that stands there."""
    text = str(error)
    place = _PLACE.search(text)
    field = place["path"] if place else ""
    expectation = text[: place.start()] if place else text
    named = _NAMED_FIELD.search(expectation)
    if named:
        field = f"{field}.{named['name']}" if field else named["name"]
        return Invalid(f"{field}: {expectation}", field)
    if not field:
        return Invalid(expectation)
    try:
        found: Any = _decoder(Any, form).decode(body)
        for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", field):
            found = found[name] if name else found[int(index)]
    except (KeyError, IndexError, TypeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Invalid(f"{field}: {expectation}", field)  # what follows the bad field may be no message at all
    shown = repr(found)
    return Invalid(f"{field}: {expectation}, found {shown if len(shown) <= 80 else shown[:77] + '...'}", field)


def decode_request(body: bytes) -> Request:
    """From Redis. Raises Invalid."""
    return parse(body, Request, "msgpack")  # type: ignore[arg-type]


def decode_outcome(body: bytes) -> Outcome:
    """From Redis. Raises Invalid."""
    return parse(body, Outcome, "msgpack")  # type: ignore[arg-type]
