"""Calls whose arguments stand in tags with their names: Qwen3-Coder's, Seed's, MiniMax's, DeepSeek V3.2's. No MLX.

    <function=look>
    <parameter=place>
    Zürich
    </parameter>
    </function>

There are no escapes. A value goes on to the closing tag behind which the next parameter or the call's end stands.
DeepSeek's tags say whether a value is a string:

    <｜DSML｜parameter name="place" string="true">Zürich</｜DSML｜parameter>
"""

import re
from collections.abc import Callable, Collection
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
    delimited,
    inside,
    literal,
    marker_rule,
    opening_followed_by,
    text_and_opening,
)
from scorepool.engine.text.chat.call_formats.raw_values import by_kind, read_value, told_types, value_rules
from scorepool.engine.text.chat.call_formats.schemas import (
    additional_of,
    check_keywords,
    properties_of,
    properties_of_function,
)

_NAME = re.compile(r"[^\s<>\"']+( [^\s<>\"']+)*")
_CDATA = re.compile(r"\s*+<!\[CDATA\[(?P<text>.*)\]\]>\s*+", re.DOTALL)
_FOLLOWED = ("additionalProperties", "properties", "required", "type")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The tags of a format; {} is a name. `delimiters` are texts in them that may be tokens."""

    function: str
    function_end: str
    parameter: str
    parameter_end: str
    newline: str = ""  # between a value and its tags
    after_parameter: str = "\n"
    has_cdata: bool = False  # values with <, & or a line's end may stand in <![CDATA[...]]>
    kinds: tuple[str, str] | None = None  # what follows the name of a string, and of anything else
    delimiters: Collection[str] = ()

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
        kind = "" if self.kinds is None else f"(?P<kind>{'|'.join(re.escape(each.strip()) for each in self.kinds)}|>)"
        return re.compile(rf"\s*{_pattern_of(self.parameter)}{kind}{value}{follows}", re.DOTALL)

    def rule(self, text: str, vocabulary: Vocabulary) -> str:
        return delimited(text, self.delimiters, vocabulary)

    def end_of_value(self, vocabulary: Vocabulary) -> tuple[str, str, str]:
        """Return the text that ends a value, the rule of what follows it, and what no string holds, if that is a token.

        Without tokens in the tag, all of it is the text.
        """
        end = f"{self.newline}{self.parameter_end}{self.after_parameter}"
        token = next((each for each in self.delimiters if each in vocabulary and each in end), None)
        if token is None:
            return end, "", ""
        text, _, rest = end.partition(token)
        return text, self.rule(token + rest, vocabulary), text + token


def _pattern_of(tag: str) -> str:
    """Return the pattern of an opening tag. Models forget quotes around names, or add some.

    It never goes back: a text with many spaces would take quadratic time.
    """
    before, _, after = (re.escape(each.strip('"')) for each in tag.partition("{}"))
    return rf"{before}\s*+[\"']?(?P<name>[^<>\"'\n]++)[\"']?\s*+{after}"


def parse(text: str, tools: Any, tags: Tags) -> list[Call]:
    """Return the calls, one after the other. Raises ValueError."""
    calls, at = list[Call](), 0
    while True:
        call, at = _read_call(text, at, tools, tags)
        if call is None:
            break
        calls.append(call)
    if text[at:].strip() or not calls:
        raise ValueError("this is not a list of calls")
    return calls


def _read_call(text: str, at: int, tools: Any, tags: Tags) -> tuple[Call | None, int]:
    """Return the call that begins here, if one does, and where it ends. Raises ValueError."""
    function = tags.function_pattern.match(text, at)
    if function is None:
        return None, at
    name, at, parameter_pattern = function["name"].strip(), function.end(), tags.parameter_pattern
    properties, parameters = properties_of_function(name, tools)
    arguments: dict[str, Any] = {}
    while parameter := parameter_pattern.match(text, at):
        key, at = parameter["name"].strip(), parameter.end()
        value, schema = _unwrapped(parameter["value"], tags), properties.get(key, {})
        is_string = tags.kinds is not None and parameter["kind"] == tags.kinds[0].strip()
        is_text = is_string and "string" in told_types(schema, parameters)
        arguments[key] = value if is_text else read_value(value, schema, parameters)
    end = tags.end_pattern.match(text, at)
    if end is None:
        raise ValueError("a text stands where a parameter was expected")
    return {"name": name, "arguments": arguments}, end.end()


def _unwrapped(value: str, tags: Tags) -> str:
    found = _CDATA.fullmatch(value) if tags.has_cdata else None
    return found["text"] if found else value.removeprefix(tags.newline).removesuffix(tags.newline)


def _arguments(rule: str, parameters: Schema, strict: bool, tags: Tags, vocabulary: Vocabulary) -> list[str]:
    """Return the rules of the arguments: the parameters in the order of the schema."""
    check_keywords(parameters, _FOLLOWED, strict)
    parts, rules = list[str](), list[str]()
    for index, (name, schema, is_required) in enumerate(properties_of(parameters)):
        check_name(name, _NAME, "words without quotes, < and >")
        value, found = _valued(f"{rule}_{index}", schema, parameters, strict, tags, vocabulary)
        rules += found
        part = f"{tags.rule(tags.parameter.format(name), vocabulary)} {value}"
        parts.append(part if is_required else f"({part})?")
    if (additional := additional_of(parameters)) is not None:
        value, found = _valued(f"{rule}_more", additional, parameters, strict, tags, vocabulary)
        before, after = tags.parameter.split("{}")
        rules += [*found, f"{rule}_name: {rule.upper()}_NAME", f"{rule.upper()}_NAME: /[\\w.-]+/ {literal(after)}"]
        parts.append(f"({tags.rule(before, vocabulary)} {rule}_name {value})*")
    return [f"{rule}: {' '.join(parts) or literal('')}", *rules]


def _valued(
    rule: str, schema: Any, root: Schema, strict: bool, tags: Tags, vocabulary: Vocabulary
) -> tuple[str, list[str]]:
    """Return the fragment of what follows a parameter's name, with the tag's end, and its rules."""
    end, after, never = tags.end_of_value(vocabulary)
    if tags.kinds is None:
        rules = value_rules(rule, schema, root, strict, end, never)
        return f"{literal(tags.newline) if tags.newline else ''} {rule} {after}", rules
    alternatives, rules = list[str](), list[str]()
    for kind, each in zip(tags.kinds, by_kind(schema, root), strict=True):
        if each is not None:
            name = f"{rule}_{len(alternatives)}"
            rules += value_rules(name, each, root, strict, end, never)
            alternatives.append(f"{literal(kind)} {name}")
    return f"({' | '.join(alternatives)}) {after}", rules


def _tag(start: str, end: str, vocabulary: Vocabulary, tags: Tags, several_functions: bool) -> ToolCallTag:
    call = f'{start} "\\n" function "\\n" {end}'
    several = f'{start} "\\n" (function "\\n")+ {end}' if several_functions else f"({call})+"
    arguments = partial(_arguments, tags=tags, vocabulary=vocabulary)
    return ToolCallTag(call_of=_call_of(tags, vocabulary), one=call, several=several, arguments=arguments)


def _call_of(tags: Tags, vocabulary: Vocabulary, newline: str = "\n") -> Callable[[str, str], str]:
    def call_of(name: str, arguments: str) -> str:
        check_name(name, _NAME, "words without quotes, < and >")
        before = tags.rule(tags.function.format(name) + newline, vocabulary)
        return f"{before} {arguments} {tags.rule(tags.function_end, vocabulary)}"

    return call_of


def _format(markers: tuple[str, str], tags: Tags, mlx_lm: str | None, several_functions: bool = False) -> CallFormat:
    return CallFormat(
        markers=markers,
        parse=partial(parse, tags=tags),
        tag=partial(_tag, tags=tags, several_functions=several_functions),
        mlx_lm=mlx_lm,
        tells=markers,
    )


_STEP_HEAD = re.compile(r"\s*+(?:<｜tool_sep｜>\s*+)?<｜tool_call_begin｜>[^<]*(?:<｜tool_sep｜>[^<]*)?")
_STEP_END = re.compile(r"\s*<｜tool_call_end｜>\s*")


def _parse_step(text: str, tools: Any) -> list[Call]:
    """Return the calls of Step 3, each between tokens of its own. Raises ValueError."""
    calls, at = list[Call](), 0
    while head := _STEP_HEAD.match(text, at):
        call, at = _read_call(text, head.end(), tools, _STEP)
        end = _STEP_END.match(text, at)
        if call is None or end is None:
            raise ValueError("a call has no end")
        calls.append(call)
        at = end.end()
    if text[at:].strip() or not calls:
        raise ValueError("this is not a list of calls")
    return calls


def _step_tag(start: str, end: str, vocabulary: Vocabulary) -> ToolCallTag | None:
    token_ids = [vocabulary.get(f"<｜tool_{name}｜>") for name in ("call_begin", "sep", "call_end")]
    if None in token_ids:
        return None
    call_start, separator, call_end = (marker_rule([token]) for token in token_ids if token is not None)
    call = f'{call_start} "function" {separator} function {call_end}'
    return ToolCallTag(
        call_of=_call_of(_STEP, vocabulary, newline=""),
        one=f"{start} {call} {end}",
        several=f"{start} ({call})+ {end}",
        arguments=partial(_arguments, tags=_STEP, vocabulary=vocabulary),
    )


def _parse_minicpm(text: str, tools: Any) -> list[Call]:
    """Return the call of MiniCPM5. The first token may begin before it. Raises ValueError."""
    return parse(text[text.index(_MINICPM_OPENING) :], tools, _MINICPM)


def _minicpm_tag(_: str, __: str, vocabulary: Vocabulary) -> ToolCallTag:
    def call_of(name: str, arguments: str) -> str:
        check_name(name, _NAME, "words without quotes, < and >")
        return f'{literal(f"""{name}">""")} {arguments} "</function>"'

    opening = f'{_MINICPM_OPENING}"'
    return ToolCallTag(
        call_of=call_of,
        one="function",
        several=f'function ("\\n"? {literal(opening)} function)*',
        arguments=partial(_arguments, tags=_MINICPM, vocabulary=vocabulary),
        opening=literal(opening),
        text_and_opening=text_and_opening(opening, (), vocabulary),
    )


_MINICPM_OPENING = "<function name="
_DSML = "｜DSML｜"  # a token


def _dsml(block: str) -> CallFormat:
    """Return DeepSeek's format, whose calls stand in a block of this name."""
    opening, closing = f"<{_DSML}{block}>", f"</{_DSML}{block}>"

    def tag(_: str, __: str, vocabulary: Vocabulary) -> ToolCallTag:
        end, begin = _DEEPSEEK.rule(closing, vocabulary), f"{opening}\n"
        return ToolCallTag(
            call_of=_call_of(_DEEPSEEK, vocabulary),
            one=f'function "\\n" {end}',
            several=f'(function "\\n")+ {end}',
            arguments=partial(_arguments, tags=_DEEPSEEK, vocabulary=vocabulary),
            opening=delimited(begin, [_DSML], vocabulary),
            text_and_opening=text_and_opening(begin, [_DSML], vocabulary),
        )

    return CallFormat(
        opening=opening,
        opening_pattern=opening_followed_by(opening, "<"),
        opens_anywhere=True,
        closing=closing,
        parse=partial(inside, opening=opening, closing=closing, parse=partial(parse, tags=_DEEPSEEK)),
        tag=tag,
        delimiters=[_DSML],
        needed_tokens=[_DSML],
        tells=(_DSML, f"{block}>"),
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
_DEEPSEEK = Tags(
    function=f'<{_DSML}invoke name="{{}}">',
    function_end=f"</{_DSML}invoke>",
    parameter=f'<{_DSML}parameter name="{{}}"',
    parameter_end=f"</{_DSML}parameter>",
    kinds=(' string="true">', ' string="false">'),
    delimiters=[_DSML],
)
_MINICPM = Tags(
    function='<function name="{}">',
    function_end="</function>",
    parameter='<param name="{}">',
    parameter_end="</param>",
    after_parameter="",
    has_cdata=True,
)
_STEP = Tags(
    function='<steptml:invoke name="{}">',
    function_end="</steptml:invoke>",
    parameter='<steptml:parameter name="{}">',
    parameter_end="</steptml:parameter>",
    after_parameter="",
)
QWEN3_CODER = _format(("<tool_call>", "</tool_call>"), _QWEN, "qwen3_coder")
SEED_OSS = _format(("<seed:tool_call>", "</seed:tool_call>"), _SEED, None)
MINIMAX_M2 = _format(("<minimax:tool_call>", "</minimax:tool_call>"), _MINIMAX, "minimax_m2", several_functions=True)
DEEPSEEK_V32 = _dsml("function_calls")
DEEPSEEK_V4 = _dsml("tool_calls")
STEP3 = CallFormat(
    markers=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    parse=_parse_step,
    tag=_step_tag,
    tells=("<｜tool_calls_begin｜>", "<steptml:invoke"),
)
MINICPM5 = CallFormat(
    opening=_MINICPM_OPENING,
    closing="</function>",
    opens_anywhere=True,
    parse=_parse_minicpm,
    tag=_minicpm_tag,
    mlx_lm="minicpm5",
    tells=('<function name="', '<param name="'),
)
