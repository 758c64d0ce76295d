"""MiniMax M3's calls: tags behind a token, nested as the arguments are. No MLX.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="look">]<]minimax[>[<place>Zürich]<]minimax[>[</place>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

The elements of a list are tags <item>. Strings have no quotes: the schema decides what a text means.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from scorepool.engine.text.chat.call_formats.call_format import (
    Call,
    CallFormat,
    Schema,
    ToolCallTag,
    Vocabulary,
    check_name,
    delimiter_rule,
    inside,
    literal,
    text_and_opening,
)
from scorepool.engine.text.chat.call_formats.raw_values import read_value, text_rules, told_types
from scorepool.engine.text.chat.call_formats.schema_rules import SchemaRules, Spelling
from scorepool.engine.text.chat.call_formats.schemas import leaves, properties_of_function

_NAMESPACE = "]<]minimax[>["  # a token
_OPENING, _CLOSING = f"{_NAMESPACE}<tool_call>", f"{_NAMESPACE}</tool_call>"
_INVOKE = re.compile(r"<invoke\s+name=\"(?P<name>[^\"]+)\">")
_TAG = re.compile(r"<(?P<end>/?)(?P<name>[^<>\s/\"]+)>")
_NAME = re.compile(r"[^\s<>/\"]+")
_NAMES = "one word without quotes, <, > and /"


@dataclass(slots=True)
class _Element:
    """A tag with what stands in it: a text, or other tags."""

    name: str
    text: str
    children: list["_Element"] = field(default_factory=list)


def parse(text: str, tools: Any) -> list[Call]:
    """Return the calls, one after the other. Raises ValueError."""
    calls = list[Call]()
    for name, element in _invocations(text):
        _, parameters = properties_of_function(name, tools)
        calls.append({"name": name, "arguments": _object(element, parameters, parameters)})
    if not calls:
        raise ValueError("there is no call")
    return calls


def _invocations(text: str) -> Iterator[tuple[str, _Element]]:
    """Yield the name of each call, and its arguments. Raises ValueError."""
    before, *pieces = text.split(_NAMESPACE)
    if before.strip():
        raise ValueError("a text stands before the calls")
    open_elements, function = list[_Element](), ""
    for piece in pieces:
        if not open_elements:
            invoke = _INVOKE.match(piece)
            if invoke is None:
                raise ValueError("expected a call")
            function = invoke["name"]
            open_elements.append(_Element("invoke", piece[invoke.end() :]))
            continue
        tag = _TAG.match(piece)
        if tag is None:
            raise ValueError("expected a tag")
        if tag["end"]:
            element = open_elements.pop()
            if element.name != tag["name"]:
                raise ValueError("a tag has another end")
            if not open_elements:
                yield function, element
        else:
            open_elements.append(_Element(tag["name"], piece[tag.end() :]))
            open_elements[-2].children.append(open_elements[-1])
    if open_elements:
        raise ValueError("a tag has no end")


def _value(element: _Element, schema: Any, root: Schema) -> Any:
    types = told_types(schema, root)
    if not element.children:
        if element.text.strip() or "string" in types or not types & {"array", "object"}:
            return read_value(element.text, schema, root)
        return [] if "array" in types else {}
    is_list = all(child.name == "item" for child in element.children)
    if "array" in types and (is_list or "object" not in types):
        items = _leaf(schema, root, "array").get("items", {})
        return [_value(child, items, root) for child in element.children]
    return _object(element, _leaf(schema, root, "object"), root)


def _object(element: _Element, schema: Schema, root: Schema) -> dict[str, Any]:
    """Return an object. The values of tags with the same name are a list."""
    properties, found = schema.get("properties") or {}, dict[str, list[Any]]()
    for child in element.children:
        found.setdefault(child.name, []).append(_value(child, properties.get(child.name, {}), root))
    return {name: values if len(values) > 1 else values[0] for name, values in found.items()}


def _leaf(schema: Any, root: Schema, type_name: str) -> Schema:
    """Return the schema of this type among those that a schema lets one choose from."""
    return next((leaf for leaf in leaves(schema, root) if type_name in told_types(leaf, root)), {})


class _M3Spelling(Spelling):
    words: ClassVar = {"true": "true", "false": "false", "null": "null"}
    comma = ""
    of_objects = of_arrays = ("", "")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._namespace = delimiter_rule(_NAMESPACE, vocabulary)

    def member(self, name: str, value: str) -> str:
        check_name(name, _NAME, _NAMES)
        return f"{self._namespace} {literal(f'<{name}>')} {value} {self._namespace} {literal(f'</{name}>')}"

    def any_member(self, value: str) -> str:
        return self.member("item", value)  # a grammar cannot say that a tag ends with the name that it began with

    def item(self, value: str) -> str:
        return self.member("item", value)

    def constant(self, text: str) -> str:
        return literal(text)

    def string(self, rule: str, schema: Schema, strict: bool) -> list[str]:
        return text_rules(rule, schema, strict, "", _NAMESPACE)


def _arguments(rule: str, parameters: Schema, strict: bool, vocabulary: Vocabulary) -> list[str]:
    rules = SchemaRules(_M3Spelling(vocabulary), parameters, rule, strict)
    rules.add_object(rule, parameters)
    return rules.lines


def _tag(_: str, __: str, vocabulary: Vocabulary) -> ToolCallTag:
    namespace = delimiter_rule(_NAMESPACE, vocabulary)

    def call_of(name: str, arguments: str) -> str:
        check_name(name, _NAME, _NAMES)
        return f'{namespace} {literal(f"""<invoke name="{name}">""")} {arguments} {namespace} "</invoke>\\n"'

    end = f'{namespace} "</tool_call>"'
    return ToolCallTag(
        call_of=call_of,
        one=f"function {end}",
        several=f"function+ {end}",
        arguments=partial(_arguments, vocabulary=vocabulary),
        opening=f'{namespace} "<tool_call>\\n"',
        text_and_opening=text_and_opening(f"{_OPENING}\n", [_NAMESPACE], vocabulary),
    )


M3 = CallFormat(
    opening=_OPENING,
    closing=_CLOSING,
    opens_anywhere=True,
    parse=partial(inside, opening=_OPENING, closing=_CLOSING, parse=parse),
    tag=_tag,
    delimiters=[_NAMESPACE],
    needed_tokens=[_NAMESPACE],
    tells=(_NAMESPACE, "<tool_call>"),
)
