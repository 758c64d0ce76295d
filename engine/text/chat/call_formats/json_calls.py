"""Calls that are JSON: an object each, or a list of objects, after a marker or a text. No MLX."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

from scorepool.engine.text.chat.call_formats.call_format import (
    Call,
    CallFormat,
    ToolCallTag,
    Vocabulary,
    literal,
)

_NAMES = ("name", "tool_name")  # the second is Cohere's
_ARGUMENTS = ("arguments", "parameters", "args")  # Llama's is the second, Inkling's the third
_BETWEEN_CALLS = re.compile(r"[\s;,]*")


def parse(text: str, _: Any, before: str = "", after: str = "") -> list[Call]:
    """Return the calls of JSON values one after the other, or of lists of them. Raises ValueError."""
    body = text.strip().removeprefix(before).removesuffix(after)
    return [with_arguments(each) for each in _json_values(body)]


def _json_values(text: str) -> Iterator[Any]:
    """Yield JSON values one after the other, or those of one list. Raises ValueError."""
    decoder, at = json.JSONDecoder(), 0
    while (at := _BETWEEN_CALLS.match(text, at).end()) < len(text):  # type: ignore[union-attr]
        value, at = decoder.raw_decode(text, at)
        yield from value if isinstance(value, list) else [value]


def with_arguments(call: Call) -> Call:
    """Give name and arguments the names that they have in most formats. Raises KeyError."""
    return {"name": _first_of(_NAMES, call), "arguments": _first_of(_ARGUMENTS, call)}


def _first_of(names: Sequence[str], call: Call) -> Any:
    return call[next((name for name in names if name in call), names[0])]


def json_call(name: str, arguments: str, arguments_name: str = "arguments") -> str:
    before = f'{{"name": {json.dumps(name)}, "{arguments_name}": '
    return f'{literal(before)} {arguments} "}}"'


def list_of_calls(before: str, after: str) -> ToolCallTag:
    several = f"{before} function (/, ?/ function)* {after}"
    return ToolCallTag(call_of=json_call, one=f"{before} function {after}", several=several)


def _hermes_tag(start: str, end: str, _: Vocabulary) -> ToolCallTag:
    call = f'{start} "\\n"? function "\\n"? {end}'
    return ToolCallTag(call_of=json_call, one=call, several=f"({call})+")


def _granite_tag(start: str, _: str, __: Vocabulary) -> ToolCallTag:
    return list_of_calls(f'{start} "["', '"]"')


def _llama_tag(*_: Any) -> ToolCallTag:
    call_of = partial(json_call, arguments_name="parameters")
    return ToolCallTag(call_of=call_of, one="function", several='function ("; " function)*')


def _opened_list(
    opening: str, closing: str, tells: Collection[str], optional_markers: tuple[str, str] | None = None
) -> CallFormat:
    """Return the format of answers that are a list of calls between two texts."""
    return CallFormat(
        opening=opening,
        optional_markers=optional_markers,
        parse=partial(parse, before=opening, after=closing),
        tag=lambda *_: list_of_calls(literal(f"{opening}["), literal(f"]{closing}")),
        tells=tells,
    )


HERMES = CallFormat(markers=("<tool_call>", "</tool_call>"), parse=parse, tag=_hermes_tag, mlx_lm="json_tools")
GRANITE = CallFormat(
    markers=("<|tool_call|>", ""), parse=parse, tag=_granite_tag, tells=("<|tool_call|>", "<|start_of_role|>")
)
LLAMA3 = CallFormat(
    opening="{",
    optional_markers=("<|python_tag|>", ""),
    parse=parse,
    tag=_llama_tag,
    tells=("<|start_header_id|>", '"parameters": '),
)
JAMBA = _opened_list("<tool_calls>", "</tool_calls>", tells=("<tool_calls>", "</tool_calls>"))
NEMOTRON = _opened_list("<TOOLCALL>", "</TOOLCALL>", tells=("<TOOLCALL>", "</TOOLCALL>"))
PHI4_MINI = _opened_list("functools", "", tells=("functools[",), optional_markers=("<|tool_call|>", "<|/tool_call|>"))
ERNIE = CallFormat(
    markers=("<tool_call>", "</tool_call>"),
    content_marks=(("<response>",), ("</response>",)),
    parse=parse,
    tag=_hermes_tag,
    mistaken_for="hermes",
    tells=("<tool_call>", "<response>"),
)
XLAM = CallFormat(
    opening="[",
    opening_pattern=re.compile(rb"\[\s*((?P<opened>\{)|$)"),
    optional_markers=("<tool_call>", "</tool_call>"),
    parse=parse,
    tag=lambda *_: list_of_calls(literal("["), literal("]")),
    tells=('{"name": "tool_call_name", "arguments"',),
)
