"""Calls whose arguments stand in tags with their names: Qwen3-Coder's, Seed's, MiniMax's. No MLX.

    <function=look>
    <parameter=place>
    Zürich
    </parameter>
    </function>

There are no escapes. A value goes on to the closing tag behind which the next parameter or the call's end stands.
"""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from scorepool.engine.text.chat.call_formats.call_format import (
    Call,
    CallFormat,
    Schema,
    ToolCallTag,
    Vocabulary,
    check_name,
    literal,
)
from scorepool.engine.text.chat.call_formats.raw_values import read_value, value_rules
from scorepool.engine.text.chat.call_formats.schemas import (
    additional_of,
    check_keywords,
    properties_of,
    properties_of_function,
)

_NAME = re.compile(r"[^\s<>\"']+( [^\s<>\"']+)*")
_FOLLOWED = ("additionalProperties", "properties", "required", "type")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The tags of a format; {} is a name."""

    function: str
    function_end: str
    parameter: str
    parameter_end: str
    newline: str = ""  # between a value and its tags
    after_function: str = "\n"

    @property
    def function_pattern(self) -> re.Pattern[str]:
        return re.compile(r"\s*" + _pattern_of(self.function))

    @property
    def end_pattern(self) -> re.Pattern[str]:
        return re.compile(rf"\s*(?:{re.escape(self.function_end)}|$)")

    @property
    def parameter_pattern(self) -> re.Pattern[str]:
        beginning = re.escape(self.parameter.partition("{}")[0])
        follows = rf"(?=\s*(?:{beginning}|{re.escape(self.function_end)}|$))"
        value = r"(?P<value>.*?)" + re.escape(self.parameter_end)
        return re.compile(rf"\s*{_pattern_of(self.parameter)}{value}{follows}", re.DOTALL)


def _pattern_of(tag: str) -> str:
    """Return the pattern of an opening tag. Models forget quotes around names, or add some."""
    before, _, after = (re.escape(each.strip('"')) for each in tag.partition("{}"))
    return rf"{before}\s*[\"']?(?P<name>[^<>\"'\n]+?)[\"']?\s*{after}"


def parse(text: str, tools: Any, tags: Tags) -> list[Call]:
    """Return the calls, one after the other. Raises ValueError."""
    function_pattern, parameter_pattern, end_pattern = tags.function_pattern, tags.parameter_pattern, tags.end_pattern
    calls, at = list[Call](), 0
    while function := function_pattern.match(text, at):
        name, at = function["name"].strip(), function.end()
        properties, parameters = properties_of_function(name, tools)
        arguments: dict[str, Any] = {}
        while parameter := parameter_pattern.match(text, at):
            key, at = parameter["name"].strip(), parameter.end()
            value = _unwrapped(parameter["value"], tags.newline)
            arguments[key] = read_value(value, properties.get(key, {}), parameters)
        end = end_pattern.match(text, at)
        if end is None:
            raise ValueError("a text stands where a parameter was expected")
        at = end.end()
        calls.append({"name": name, "arguments": arguments})
    if text[at:].strip() or not calls:
        raise ValueError("this is not a list of calls")
    return calls


def _unwrapped(value: str, newline: str) -> str:
    return value.removeprefix(newline).removesuffix(newline)


def _arguments(rule: str, parameters: Schema, strict: bool, tags: Tags) -> list[str]:
    """Return the rules of the arguments: the parameters in the order of the schema."""
    check_keywords(parameters, _FOLLOWED, strict)
    end = f"{tags.newline}{tags.parameter_end}\n"
    parts, rules = list[str](), list[str]()
    for index, (name, schema, is_required) in enumerate(properties_of(parameters)):
        check_name(name, _NAME, "words without quotes, < and >")
        value = f"{rule}_{index}"
        rules += value_rules(value, schema, parameters, strict, end)
        parts.append(f"{literal(tags.parameter.format(name) + tags.newline)} {value}")
        if not is_required:
            parts[-1] = f"({parts[-1]})?"
    if (additional := additional_of(parameters)) is not None:
        rules += value_rules(f"{rule}_more", additional, parameters, strict, end)
        before, after = tags.parameter.split("{}")
        name_terminal = f"{rule.upper()}_NAME"
        rules.append(f"{name_terminal}: {literal(before)} /[\\w.-]+/ {literal(after + tags.newline)}")
        parts.append(f"({name_terminal} {rule}_more)*")
    return [f"{rule}: {' '.join(parts) or literal('')}", *rules]


def _tag(start: str, end: str, _: Vocabulary, tags: Tags, several_functions: bool) -> ToolCallTag:
    def call_of(name: str, arguments: str) -> str:
        check_name(name, _NAME, "words without quotes, < and >")
        return f"{literal(tags.function.format(name) + chr(10))} {arguments} {literal(tags.function_end)}"

    call = f'{start} "\\n" function "\\n" {end}'
    several = f'{start} "\\n" (function "\\n")+ {end}' if several_functions else f"({call})+"
    return ToolCallTag(call_of=call_of, one=call, several=several, arguments=partial(_arguments, tags=tags))


def _format(markers: tuple[str, str], tags: Tags, mlx_lm: str | None, several_functions: bool = False) -> CallFormat:
    return CallFormat(
        markers=markers,
        parse=partial(parse, tags=tags),
        tag=partial(_tag, tags=tags, several_functions=several_functions),
        mlx_lm=mlx_lm,
        tells=markers,
    )


_QWEN = Tags(
    function="<function={}>",
    function_end="</function>",
    parameter="<parameter={}>",
    parameter_end="</parameter>",
    newline="\n",
)
_SEED = Tags(
    function="<function={}>", function_end="</function>", parameter="<parameter={}>", parameter_end="</parameter>"
)
_MINIMAX = Tags(
    function='<invoke name="{}">',
    function_end="</invoke>",
    parameter='<parameter name="{}">',
    parameter_end="</parameter>",
)
QWEN3_CODER = _format(("<tool_call>", "</tool_call>"), _QWEN, "qwen3_coder")
SEED_OSS = _format(("<seed:tool_call>", "</seed:tool_call>"), _SEED, None)
MINIMAX_M2 = _format(("<minimax:tool_call>", "</minimax:tool_call>"), _MINIMAX, "minimax_m2", several_functions=True)
