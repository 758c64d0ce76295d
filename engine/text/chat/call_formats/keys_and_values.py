"""Calls whose arguments are pairs of a key and a value, in tags: GLM's, LongCat's, Hunyuan 3's, Solar Open 2's. No MLX.

    look
    <arg_key>place</arg_key>
    <arg_value>Zürich</arg_value>

A value goes on to the closing tag behind which the next key or the call's end stands.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
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
_SPACE = r"(?:\\n|\s)*+"  # some models write the two characters \n


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The tags of a format. `key_end` and `name_end` are empty where the next tag ends a key or a name."""

    key: str
    key_end: str
    value: str
    value_end: str
    name_end: str = ""
    before_pairs: str = '"\\n"?'  # a rule
    call: tuple[str, str] | None = None  # around each call, where the markers are around all of them

    @property
    def all(self) -> list[str]:
        """The tags that may be tokens."""
        return [
            tag
            for tag in (self.key, self.key_end, self.value, self.value_end, self.name_end, *(self.call or ()))
            if tag
        ]

    @property
    def pair_pattern(self) -> re.Pattern[str]:
        key, key_end, value, value_end = map(re.escape, (self.key, self.key_end, self.value, self.value_end))
        return re.compile(
            rf"{_SPACE}{key}(?P<key>[^<]*+){key_end}{_SPACE}{value}(?P<value>.*?){value_end}(?={_SPACE}(?:{key}|$))",
            re.DOTALL,
        )


def parse(text: str, tools: Any, tags: Tags) -> list[Call]:
    """Return the call, or those in the tags of calls. Raises ValueError."""
    if tags.call is not None:
        return _parse_several(text, tools, tags, tags.call)
    if text.lstrip().startswith("{"):
        return json_calls.parse(text, tools)
    return [_parse_one(text, tools, tags)]


def _parse_several(text: str, tools: Any, tags: Tags, call: tuple[str, str]) -> list[Call]:
    start, end = map(re.escape, call)
    pattern = re.compile(rf"\s*{start}(?P<call>.*?){end}(?=\s*(?:{start}|$))", re.DOTALL)
    calls, at = list[Call](), 0
    while found := pattern.match(text, at):
        calls.append(_parse_one(found["call"], tools, tags))
        at = found.end()
    if text[at:].strip() or not calls:
        raise ValueError("this is not a list of calls")
    return calls


def _parse_one(text: str, tools: Any, tags: Tags) -> Call:
    """Return the call: a name, and pairs. Raises ValueError."""
    name, first, rest = text.partition(tags.key)
    name, rest, at = name.replace("\\n", " ").strip().removesuffix(tags.name_end).strip(), first + rest, 0
    if not _NAME.fullmatch(name):
        raise ValueError("this is no name of a function")
    properties, parameters = properties_of_function(name, tools)
    pattern, arguments = tags.pair_pattern, dict[str, Any]()
    while pair := pattern.match(rest, at):
        key, at = pair["key"].strip(), pair.end()
        arguments[key] = read_value(pair["value"], properties.get(key, {}), parameters)
    if rest[at:].replace("\\n", " ").strip():
        raise ValueError("a text stands where a key was expected")
    return {"name": name, "arguments": arguments}


def _arguments(rule: str, parameters: Schema, strict: bool, tags: Tags, vocabulary: Vocabulary) -> list[str]:
    """Return the rules of the arguments: the pairs in the order of the schema."""
    check_keywords(parameters, _FOLLOWED, strict)
    end, never = ("", tags.value_end) if tags.value_end in vocabulary else (tags.value_end, "")
    key_start, value_start, value_end = (
        delimiter_rule(tag, vocabulary) for tag in (tags.key, tags.value, tags.value_end)
    )
    key_end = f'{delimiter_rule(tags.key_end, vocabulary)} "\\n"?' if tags.key_end else ""
    after = f'{value_end if not end else ""} "\\n"?'
    parts, rules = list[str](), list[str]()
    for index, (name, schema, is_required) in enumerate(properties_of(parameters)):
        check_name(name, _KEY, "words without < and >")
        value = f"{rule}_{index}"
        rules += value_rules(value, schema, parameters, strict, end, never)
        pair = f"{key_start} {literal(name)} {key_end} {value_start} {value} {after}"
        parts.append(pair if is_required else f"({pair})?")
    if (additional := additional_of(parameters)) is not None:
        rules += value_rules(f"{rule}_more", additional, parameters, strict, end, never)
        parts.append(f"({key_start} /[\\w.-]+/ {key_end} {value_start} {rule}_more {after})*")
    return [f"{rule}: {' '.join(parts) or literal('')}", *rules]


def _tag(start: str, end: str, vocabulary: Vocabulary, tags: Tags) -> ToolCallTag:
    name_end = delimiter_rule(tags.name_end, vocabulary) if tags.name_end else ""

    def call_of(name: str, arguments: str) -> str:
        check_name(name, _NAME, "one word without < and >")
        return f"{literal(name)} {name_end} {tags.before_pairs} {arguments}"

    one = f"{start} function {end}"
    several = f"({one})+"
    if tags.call is not None:
        before, after = (delimiter_rule(tag, vocabulary) for tag in tags.call)
        call = f'{before} function {after} "\\n"?'
        one, several = (f'{start} "\\n"? {calls} {end}' for calls in (call, f"({call})+"))
    arguments = partial(_arguments, tags=tags, vocabulary=vocabulary)
    return ToolCallTag(call_of=call_of, one=one, several=several, arguments=arguments)


def _format(
    markers: tuple[str, str], tags: Tags, mlx_lm: str | None, tells: Collection[str] = (), mistaken_for: str = ""
) -> CallFormat:
    return CallFormat(
        markers=markers,
        parse=partial(parse, tags=tags),
        tag=partial(_tag, tags=tags),
        delimiters=tags.all,
        mlx_lm=mlx_lm,
        mistaken_for=mistaken_for,
        tells=tells or (*markers, tags.key),
    )


def _pairs(prefix: str, **others: Any) -> Tags:
    key, value = f"{prefix}arg_key>", f"{prefix}arg_value>"
    return Tags(key=f"<{key}", key_end=f"</{key}", value=f"<{value}", value_end=f"</{value}", **others)


_SOLAR = Tags(
    key="<|tool_arg:start|>",
    key_end="",
    value="<|tool_arg:value|>",
    value_end="<|tool_arg:end|>",
    before_pairs='"\\n"',
)
GLM = _format(("<tool_call>", "</tool_call>"), _pairs(""), "glm47")
LONGCAT = _format(("<longcat_tool_call>", "</longcat_tool_call>"), _pairs("longcat_"), "longcat")
HY_V3 = _format(
    ("<tool_calls>", "</tool_calls>"),
    _pairs("", name_end="<tool_sep>", call=("<tool_call>", "</tool_call>")),
    None,
    tells=("<tool_calls>", "<tool_sep>", "<arg_key>"),
    mistaken_for="glm47",
)
SOLAR_OPEN2 = _format(("<|tool_call:start|>", "<|tool_call:end|>"), _SOLAR, None)
