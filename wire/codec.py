"""Encode messages and decode them. Each codec is built once; JSON and msgpack carry the same structs."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import inspect

from scorepool.wire import free_form
from scorepool.wire.columns import Floats
from scorepool.wire.quote import cut, quote
from scorepool.wire.request import Request
from scorepool.wire.request_fields import MAX_LIST_LENGTH
from scorepool.wire.result import Outcome

T = TypeVar("T")
Format = Literal["json", "msgpack"]
MAX_FREE_FORM_BYTES = 2**20  # of the schemas and the arguments of calls of one request: a worker decodes it at once
# Of those of one body. The API bounds the lists of a JSON body, which take more bytes than in msgpack.
MAX_FREE_FORM_BYTES_TOGETHER: dict[Format, int] = {"json": 8 * 2**20, "msgpack": 2**20}


class Invalid(ValueError):
    """Report that bytes are not the expected message. `field` is a path such as `items[0].prompt`, or None."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


def _to_msgpack(value: object) -> Any:
    if isinstance(value, Floats):
        return value.pack()
    return _plain(value)


def _to_json(value: object) -> Any:
    if isinstance(value, Floats):
        return value.values()
    return _plain(value)


def _plain(value: object) -> Any:
    """Return the numbers of an array of numpy or torch. Raises TypeError for what no message holds."""
    if callable(tolist := getattr(value, "tolist", None)):
        return tolist()
    raise TypeError(f"cannot send {quote(repr(value))}, a {type(value).__name__}: expected what JSON has")


def _to_floats(expected: type, value: Any) -> Any:
    if expected is Floats:
        return Floats.unpack(value) if isinstance(value, bytes) else Floats(value)
    raise NotImplementedError(f"cannot read {expected.__name__}")


_msgpack = msgspec.msgpack.Encoder(enc_hook=_to_msgpack)
_json = msgspec.json.Encoder(enc_hook=_to_json)


@cache
def _decoder(message_type: Any, message_format: Format) -> Any:
    module = msgspec.json if message_format == "json" else msgspec.msgpack
    return module.Decoder(message_type, dec_hook=_to_floats)


def encode(message: object) -> bytes:
    """Encode as msgpack, the format in which messages are stored in Redis."""
    return _msgpack.encode(message)


def encode_json(message: object) -> bytes:
    """Encode as JSON."""
    return _json.encode(message)


def convert(value: Any, message_type: type[T], name: str) -> T:
    """Return dicts and lists as a message, which they may hold already; raise ValueError, which names the place."""
    try:
        return msgspec.convert(value, message_type)
    except msgspec.ValidationError as error:
        raise ValueError(f"`{name}`: {str(error).replace('`$', f'`{name}')}") from None


def on_one_line(encoded: bytes) -> bytes:
    """Escape the characters of JSON at which some readers end a line, as Python's `str.splitlines` does."""
    for character, escape in _LINE_ENDS:
        encoded = encoded.replace(character, escape)
    return encoded


_LINE_ENDS = [(character.encode(), f"\\u{ord(character):04x}".encode()) for character in "\x85\u2028\u2029"]


def parse(body: bytes, message_type: type[T], message_format: Format = "json", name: str = "the body") -> T:
    """Decode a message; raise Invalid, which names the field, its value and what is expected.

    `name` is what the error calls a message that is not of the format at all.
    """
    try:
        return _decoder(message_type, message_format).decode(body)  # type: ignore[no-any-return,arg-type]
    except msgspec.ValidationError as error:
        raise _explain(error, body, message_type, message_format) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"{name} is not valid {message_format}: {error}") from None


# msgspec reports the path only in its text: `... field `x` - at `$.items[0]``.
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*)`$")
_FIELD_IN_QUOTES = re.compile(r"(?:unknown|required) field `(?P<name>[^`]*)`")
_INVALID_CHOICE = re.compile(r"Invalid (?:enum )?value")  # msgspec does not list the valid values
_LEADING_FIELD = re.compile(
    r"`(?P<name>\w+)(?P<path>(\[\d+\]|\.\w+)*)`(?! and `)"
)  # errors of `__post_init__` begin with the name of the field
_INDEX = re.compile(r"\[\d+\]")  # at the start of a field: that of a request in a list of them
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")  # one step of a path: the name of a field, or an index
_MAX_SENTENCE = 1000  # characters of msgspec's sentence, which repeats a name of any length, that are read
_MAX_EXPLAINED_BYTES = 2**20  # of a body that is decoded again to show the value of a field


def _explain(error: msgspec.ValidationError, body: bytes, message_type: Any, message_format: Format) -> Invalid:
    """Split msgspec's sentence into field and expectation, and add the value of the field."""
    text = str(error)
    if len(text) > _MAX_SENTENCE:  # the name is at its start, the path at its end
        text = f"{text[: _MAX_SENTENCE // 2]}...{text[-_MAX_SENTENCE // 2 :]}"
    path = _PATH.search(text)
    field = path["path"] if path else ""
    expectation = text[: path.start()] if path else text
    quoted = _FIELD_IN_QUOTES.search(expectation)
    if quoted:
        name = cut(quoted["name"])
        field = f"{field}.{name}" if field else name
        return Invalid(f"{field}: {expectation.replace(quoted['name'], name)}", field)
    if _INVALID_CHOICE.match(expectation) and (
        choices := set(_choices(inspect.type_info(message_type), _STEP.findall(field)))
    ):
        expectation = f"Expected {' | '.join(map(repr, sorted(choices)))}"
    if len(body) > _MAX_EXPLAINED_BYTES:
        return Invalid(f"{field}: {expectation}".removeprefix(": "), field or None)
    try:
        if message_format == "msgpack":
            free_form.check_keys(body)
        found: Any = _decoder(Any, message_format).decode(body)
        for name, index in _STEP.findall(field):
            found = found[name] if name else found[int(index)]
    except (KeyError, IndexError, TypeError, ValueError, msgspec.DecodeError, RecursionError):
        # the bytes after the invalid field may not be decodable
        return Invalid(f"{field}: {expectation}".removeprefix(": "), field or None)
    leading = _LEADING_FIELD.match(expectation)
    if leading and isinstance(found, dict) and leading["name"] in found:
        field = f"{field}.{leading['name']}{leading['path']}".removeprefix(".")
        found = _follow(found[leading["name"]], leading["path"])
    if not field:
        return Invalid(expectation)
    if ", found " not in expectation:  # a sentence of `__post_init__` may say it better
        expectation = f"{expectation}, found {quote(found)}"
    return Invalid(f"{field}: {expectation}", field)


def _follow(value: Any, path: str) -> Any:
    """Return what stands at a path below a decoded value, None if nothing does."""
    try:
        for name, index in _STEP.findall(path):
            value = value[name] if name else value[int(index)]
    except (KeyError, IndexError, TypeError):
        return None
    return value


def _choices(node: inspect.Type, steps: Sequence[tuple[str, str]]) -> Iterator[str]:
    """List the valid values at a path below a type: the values of a Literal, or the tags of a union."""
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


def check_free_form(body: bytes, message_type: Any, message_format: Format) -> None:
    """Check the size, and in msgpack the keys, of values that may be any JSON before they are built; raise Invalid.

    In msgpack a byte of them takes up to 72 bytes of memory.
    """
    outline = free_form.outline(message_type)
    if outline is None or (message_format == "json" and len(body) <= MAX_FREE_FORM_BYTES):  # then none can be larger
        return
    together = 0
    of_requests: Counter[str] = Counter()
    for field, value in free_form.values(parse(body, outline, message_format)):
        num_bytes = memoryview(value).nbytes
        index = _INDEX.match(field)
        request = index[0] if index else ""
        of_requests[request] += num_bytes
        together += num_bytes
        if of_requests[request] > MAX_FREE_FORM_BYTES:
            most, advice = f"{MAX_FREE_FORM_BYTES} bytes of schemas and arguments in one job", ""
        elif together > MAX_FREE_FORM_BYTES_TOGETHER[message_format]:
            most = f"{MAX_FREE_FORM_BYTES_TOGETHER[message_format]} bytes of schemas and arguments together"
            advice = "; send several requests"
        elif message_format == "msgpack":
            _check_keys(value, field)
            continue
        else:
            continue
        raise Invalid(f"{field}: expected at most {most}, found more{advice}", field)


def _check_keys(value: msgspec.Raw, field: str) -> None:
    try:
        free_form.check_keys(value)
    except ValueError as error:
        raise Invalid(f"{field}: {error}", field) from None


class _Entry(msgspec.Struct):
    """Skip an object: its fields are not built."""


_Entries = Annotated[list[_Entry], msgspec.Meta(max_length=MAX_LIST_LENGTH)]


def count_objects(body: bytes, message_format: Format) -> int:
    """Return the length of a list of objects without building them; raise Invalid."""
    return len(parse(body, _Entries, message_format))


def decode_request(body: bytes) -> Request:
    """Decode a request stored in Redis; raise Invalid."""
    return parse(body, Request, "msgpack")  # type: ignore[arg-type]


def decode_outcome(body: bytes) -> Outcome:
    """Decode an outcome stored in Redis; raise Invalid."""
    return parse(body, Outcome, "msgpack")  # type: ignore[arg-type]
