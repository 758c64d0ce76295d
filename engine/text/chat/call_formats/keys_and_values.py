"""Calls whose arguments are pairs of a key and a value, each in tags: GLM's and LongCat's. No MLX.

    look
    <arg_key>place</arg_key>
    <arg_value>Zürich</arg_value>

A value goes on to the closing tag behind which the next key or the call's end stands.
"""

import re
from functools import partial
from typing import Any

from scorepool.engine.text.chat.call_formats import json_calls
from scorepool.engine.text.chat.call_formats.call_format import (
    Call,
    CallFormat,
    Schema,
    ToolCallTag,
    Vocabulary,
    check_name,
    delimiter_rule,
    literal,
)
from scorepool.engine.text.chat.call_formats.raw_values import read_value, value_rules
from scorepool.engine.text.chat.call_formats.schemas import (
    additional_of,
    check_keywords,
    properties_of,
    properties_of_function,
)

_NAME = re.compile(r"[^\s<>]+")
_KEY = re.compile(r"[^\s<>]+( [^\s<>]+)*")
_FOLLOWED = ("additionalProperties", "properties", "required", "type")
_SPACE = r"(?:\\n|\s)*"  # some models write the two characters \n


def _pair_pattern(prefix: str) -> re.Pattern[str]:
    key, value = (re.escape(f"{prefix}arg_{kind}>") for kind in ("key", "value"))
    return re.compile(
        rf"{_SPACE}<{key}(?P<key>.*?)</{key}{_SPACE}<{value}(?P<value>.*?)</{value}(?={_SPACE}(?:<{key}|$))", re.DOTALL
    )


def parse(text: str, tools: Any, prefix: str) -> list[Call]:
    """Return the call: a name, and pairs. Raises ValueError."""
    if text.lstrip().startswith("{"):
        return json_calls.parse(text, tools)
    name, first, rest = text.partition(f"<{prefix}arg_key>")
    name, rest, at = name.replace("\\n", " ").strip(), first + rest, 0
    if not _NAME.fullmatch(name):
        raise ValueError("this is no name of a function")
    properties, parameters = properties_of_function(name, tools)
    pattern, arguments = _pair_pattern(prefix), dict[str, Any]()
    while pair := pattern.match(rest, at):
        key, at = pair["key"].strip(), pair.end()
        arguments[key] = read_value(pair["value"], properties.get(key, {}), parameters)
    if rest[at:].replace("\\n", " ").strip():
        raise ValueError("a text stands where a key was expected")
    return [{"name": name, "arguments": arguments}]


def _arguments(rule: str, parameters: Schema, strict: bool, prefix: str, vocabulary: Vocabulary) -> list[str]:
    """Return the rules of the arguments: the pairs in the order of the schema."""
    check_keywords(parameters, _FOLLOWED, strict)
    tags = (f"<{prefix}arg_key>", f"</{prefix}arg_key>", f"<{prefix}arg_value>", f"</{prefix}arg_value>")
    key_start, key_end, value_start, value_end = (delimiter_rule(tag, vocabulary) for tag in tags)
    end, never = ("", tags[3]) if tags[3] in vocabulary else (tags[3], "")
    after = f'{value_end if not end else ""} "\\n"?'
    parts, rules = list[str](), list[str]()
    for index, (name, schema, is_required) in enumerate(properties_of(parameters)):
        check_name(name, _KEY, "words without < and >")
        value = f"{rule}_{index}"
        rules += value_rules(value, schema, parameters, strict, end, never)
        pair = f'{key_start} {literal(name)} {key_end} "\\n"? {value_start} {value} {after}'
        parts.append(pair if is_required else f"({pair})?")
    if (additional := additional_of(parameters)) is not None:
        rules += value_rules(f"{rule}_more", additional, parameters, strict, end, never)
        parts.append(f'({key_start} /[\\w.-]+/ {key_end} "\\n"? {value_start} {rule}_more {after})*')
    return [f"{rule}: {' '.join(parts) or literal('')}", *rules]


def _tag(start: str, end: str, vocabulary: Vocabulary, prefix: str) -> ToolCallTag:
    def call_of(name: str, arguments: str) -> str:
        check_name(name, _NAME, "one word without < and >")
        return f'{literal(name)} "\\n"? {arguments}'

    call = f"{start} function {end}"
    arguments = partial(_arguments, prefix=prefix, vocabulary=vocabulary)
    return ToolCallTag(call_of=call_of, one=call, several=f"({call})+", arguments=arguments)


def _format(markers: tuple[str, str], prefix: str, mlx_lm: str) -> CallFormat:
    return CallFormat(
        markers=markers,
        parse=partial(parse, prefix=prefix),
        tag=partial(_tag, prefix=prefix),
        delimiters=[f"<{slash}{prefix}arg_{kind}>" for slash in ("", "/") for kind in ("key", "value")],
        mlx_lm=mlx_lm,
        tells=(*markers, f"<{prefix}arg_key>"),
    )


GLM = _format(("<tool_call>", "</tool_call>"), "", "glm47")
LONGCAT = _format(("<longcat_tool_call>", "</longcat_tool_call>"), "longcat_", "longcat")
