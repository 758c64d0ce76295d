"""Calls that are written in Python: [look(place="Zürich", x=1)]. No MLX."""

import re
from functools import partial
from typing import Any, ClassVar

from scorepool.engine.text.chat.call_formats.call_format import (
    COMPACT,
    Call,
    CallFormat,
    Schema,
    ToolCallTag,
    Vocabulary,
    check_name,
    delimiter_rule,
    inside,
    json_rule,
    literal,
    opening_followed_by,
    text_and_opening,
)
from scorepool.engine.text.chat.call_formats.literal_reader import LiteralReader
from scorepool.engine.text.chat.call_formats.raw_values import read_value, told_types
from scorepool.engine.text.chat.call_formats.schema_rules import SchemaRules, Spelling
from scorepool.engine.text.chat.call_formats.schemas import properties_of_function

_QUOTES = ('"""', "'''", '"', "'")
_SINGLE_QUOTED = r"""/'([^'\\\x00-\x1f]|\\[\\'"nrt])*'/"""
_NAME = re.compile(r"[^\W\d][\w.-]*")
_KEY = re.compile(r"[^\W\d]\w*")


def parse(text: str, tools: Any) -> list[Call]:
    """Return the calls of a list. Raises ValueError."""
    reader, calls = LiteralReader(text, _QUOTES, has_escapes=True), list[Call]()
    reader.expect("[")
    while not reader.take("]"):
        calls.append(_read_call(reader, tools))
        if not reader.take(","):
            reader.expect("]")
            break
    if not calls or not reader.is_at_end:
        raise ValueError("this is not a list of calls")
    return calls


def _read_call(reader: LiteralReader, tools: Any) -> Call:
    name = reader.match(_NAME)
    reader.expect("(")
    properties, parameters = properties_of_function(name, tools)
    arguments = reader.mapping(")", colon="=")
    fitted = {key: _fit(value, properties.get(key, {}), parameters) for key, value in arguments.items()}
    return {"name": name, "arguments": fitted}


def _parse_lines(text: str, tools: Any) -> list[Call]:
    """Return the calls of a list without brackets, in lines. Raises ValueError."""
    reader, calls = LiteralReader(text, _QUOTES, has_escapes=True), list[Call]()
    while not reader.is_at_end:
        calls.append(_read_call(reader, tools))
    if not calls:
        raise ValueError("there is no call")
    return calls


def _fit(value: Any, schema: Any, root: Schema) -> Any:
    """Return the value of a string in quotes where the schema wants none: some templates quote every value."""
    wants_string = not isinstance(value, str) or "string" in told_types(schema, root)
    return value if wants_string else read_value(value, schema, root)


class _PythonSpelling(Spelling):
    words: ClassVar = {"true": "True", "false": "False", "null": "None"}
    comma = "/, ?/"
    colon = "/: ?/"
    any_key = '/"[\\w.-]+"/'

    def key(self, name: str) -> str:
        return literal(literal(name))

    def constant(self, text: str) -> str:
        return literal(literal(text))

    def string(self, rule: str, schema: Schema, strict: bool) -> list[str]:
        """Return the rules of a string: JSON's are Python's too. In single quotes only if any string will do."""
        options = COMPACT if strict else COMPACT | {"lenient": True}
        json_string = json_rule({**schema, "type": "string"}, options)
        if schema.keys() - {"type"}:
            return [f"{rule}: {json_string}"]
        return [f"{rule}: {rule}_json | {_SINGLE_QUOTED}", f"{rule}_json: {json_string}"]


class _KeywordSpelling(_PythonSpelling):
    """The spelling of a call's own arguments, whose values are spelled as Python's."""

    of_objects = ('"("', '")"')
    colon = literal("=")
    any_key = "/[^\\W\\d]\\w*/"

    def key(self, name: str) -> str:
        check_name(name, _KEY, "letters, digits and _ that are names in Python")
        return literal(name)


def _arguments(rule: str, parameters: Schema, strict: bool) -> list[str]:
    rules = SchemaRules(_PythonSpelling(), parameters, rule, strict)
    rules.add_object(rule, parameters, _KeywordSpelling())
    return rules.lines


def _call_of(name: str, arguments: str) -> str:
    check_name(name, _NAME, "letters, digits, _, . and -")
    return f"{literal(name)} {arguments}"


def _tag(start: str, end: str, _: Vocabulary) -> ToolCallTag:
    return ToolCallTag(
        call_of=_call_of,
        one=f'{start} "[" function "]" {end}',
        several=f'{start} "[" function (/, ?/ function)* "]" {end}',
        arguments=_arguments,
    )


_LINES = ("<function_calls>", "</function_calls>")


def _lines_tag(_: str, __: str, vocabulary: Vocabulary) -> ToolCallTag:
    opening, closing = (delimiter_rule(mark, vocabulary) for mark in _LINES)
    return ToolCallTag(
        call_of=_call_of,
        one=f'"\\n"? function "\\n"? {closing}',
        several=f'"\\n"? function ("\\n" function)* "\\n"? {closing}',
        arguments=_arguments,
        opening=opening,
        text_and_opening=text_and_opening(_LINES[0], _LINES, vocabulary),
    )


# An answer that begins with a list of another kind, or with a link, need not be held back to its end.
_OPENING = re.compile(rb"\[\s*([^\s()\[\]{},=\"']+\s*((?P<opened>\()|$)|$)")
_opened = partial(CallFormat, opening="[", opening_pattern=_OPENING, parse=parse, tag=_tag)
LFM2 = CallFormat(markers=("<|tool_call_start|>", "<|tool_call_end|>"), parse=parse, tag=_tag, mlx_lm="pythonic")
LLAMA4 = _opened(optional_markers=("<|python_start|>", "<|python_end|>"), tells=("<|header_start|>", "[func_name1("))
PYTHONIC = _opened(tells=("[func_name1(",))
OLMO3 = CallFormat(
    opening=_LINES[0],
    opening_pattern=opening_followed_by(_LINES[0], r"[^\s<>]"),
    closing=_LINES[1],
    opens_anywhere=True,
    parse=partial(inside, opening=_LINES[0], closing=_LINES[1], parse=_parse_lines),
    tag=_lines_tag,
    delimiters=_LINES,
    tells=_LINES,
)
