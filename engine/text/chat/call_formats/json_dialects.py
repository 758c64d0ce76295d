"""Calls that are JSON under other names, or between other marks, than those of json_calls. No MLX.

<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "look", "parameters": {...}}]<|END_ACTION|>     Cohere
<|tools_prefix|>[{"look": {...}}]<|tools_suffix|>                                                   Apertus
<|action_start|><|plugin|>{"name": "look", "parameters": {...}}<|action_end|>                       InternLM
<|message_model|><|content_invoke_tool_json|>{"name": "look", "args": {...}}<|end_message|>         Inkling
<|message_sep|>function call<|role_sep|>{"name": "look", "arguments": {...}}                        GigaChat 3
<tool_calls>[{"name": "look", "arguments": {...}}]</tool_calls>                                     Hunyuan
<function_call> {"name": "look", "arguments": {...}}                                                Granite 20B
"""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from scorepool.engine.text.chat.call_formats.call_format import (
    Call,
    CallFormat,
    ToolCallTag,
    Vocabulary,
    delimited,
    delimiter_rule,
    inside,
    literal,
    marker_rule,
    opening_followed_by,
    text_and_opening,
)
from scorepool.engine.text.chat.call_formats.json_calls import json_call, parse, with_arguments

_SPACE = "[ \\n]{0,8}"
_ROLE = "<|role_sep|>"
_MESSAGE_END = "<|message_sep|>"
_GIGACHAT_CALL = "<|function_call|>"  # of 3.1
_GIGACHAT_TOKENS = tuple(f"{mark}{end}" for mark in (_ROLE, _MESSAGE_END, _GIGACHAT_CALL) for end in ("\n\n", "\n", ""))
_GIGACHAT_HEAD = re.compile(r"\s*(?:<\|message_sep\|>\s*)?(?:[^{]*<\|role_sep\|>\s*)?")
_GRANITE_HEAD = re.compile(r"\s*(?:<function_call>\s*)?")


def _list_of(start: str, end: str, call_of: Callable[[str, str], str]) -> ToolCallTag:
    """Return the spelling of a list of calls between two marks."""
    begin, stop = f"{start} /{_SPACE}\\[{_SPACE}/", f"/{_SPACE}\\]{_SPACE}/ {end}"
    return ToolCallTag(
        call_of=call_of,
        one=f"{begin} function {stop}",
        several=f"{begin} function (/,{_SPACE}/ function)* {stop}",
    )


def _cohere_tag(start: str, end: str, _: Vocabulary) -> ToolCallTag:
    def call_of(name: str, arguments: str) -> str:
        between = literal(f'", "tool_name": {json.dumps(name)}, "parameters": ')
        return f'{literal(_COHERE_ID)} /[0-9]{{1,3}}/ {between} {arguments} "}}"'

    return _list_of(start, end, call_of)


_COHERE_ID = '{"tool_call_id": "'


def _parse_apertus(text: str, _: Any) -> list[Call]:
    """Return the calls of a list of objects with one key, the name. Raises ValueError."""
    calls = list[Call]()
    for each in json.loads(text):
        ((name, arguments),) = each.items()
        calls.append({"name": name, "arguments": arguments})
    return calls


def _apertus_tag(start: str, end: str, _: Vocabulary) -> ToolCallTag:
    return _list_of(start, end, lambda name, arguments: f'{literal(f"{{{json.dumps(name)}: ")} {arguments} "}}"')


def _one_tag(start: str, end: str, vocabulary: Vocabulary, arguments_name: str, before: str = "") -> ToolCallTag:
    """Return the spelling of calls of which each stands between two marks, and maybe behind a token."""
    first = f"({marker_rule([vocabulary[before]])})?" if before in vocabulary else ""
    call = f"{first} {start} /{_SPACE}/ function /{_SPACE}/ {end}"
    return ToolCallTag(call_of=partial(json_call, arguments_name=arguments_name), one=call, several=f"({call})+")


def _parse_behind(text: str, tools: Any, head: re.Pattern[str]) -> list[Call]:
    """Return the calls of objects behind heads, which may be left out. Raises ValueError."""
    calls, decoder, at = list[Call](), json.JSONDecoder(), 0
    while (at := head.match(text, at).end()) < len(text):  # type: ignore[union-attr]
        value, at = decoder.raw_decode(text, at)
        calls.append(with_arguments(value))
    return calls


def _gigachat_tag(_: str, __: str, vocabulary: Vocabulary) -> ToolCallTag:
    tokens = {token.rstrip(): token for token in _GIGACHAT_TOKENS if token in vocabulary}  # some end with lines
    opening = tokens.get(_GIGACHAT_CALL, f"{tokens.get(_MESSAGE_END, '')}function call{tokens.get(_ROLE, _ROLE)}")
    return ToolCallTag(
        call_of=json_call,
        one="function",
        several="function",  # the template renders one
        opening=delimited(opening, _GIGACHAT_TOKENS, vocabulary),
        text_and_opening=text_and_opening(opening, _GIGACHAT_TOKENS, vocabulary),
    )


def _text_tag(vocabulary: Vocabulary, opening: str, closing: str, one: str, several: str) -> ToolCallTag:
    tokens, end = (opening, closing), delimiter_rule(closing, vocabulary) if closing else ""
    return ToolCallTag(
        call_of=json_call,
        one=f"{one} {end}",
        several=f"{several} {end}",
        opening=delimiter_rule(opening, vocabulary),
        text_and_opening=text_and_opening(opening, tokens, vocabulary),
    )


COHERE = CallFormat(
    markers=("<|START_ACTION|>", "<|END_ACTION|>"),
    content_marks=(("<|START_RESPONSE|>", "<|START_TEXT|>"), ("<|END_RESPONSE|>", "<|END_TEXT|>")),
    parse=parse,
    tag=_cohere_tag,
    tells=("<|START_ACTION|>", "<|END_ACTION|>"),
)
APERTUS = CallFormat(
    markers=("<|tools_prefix|>", "<|tools_suffix|>"),
    parse=_parse_apertus,
    tag=_apertus_tag,
    tells=("<|tools_prefix|>", "<|tools_suffix|>"),
)
INTERNLM = CallFormat(
    markers=("<|action_start|><|plugin|>", "<|action_end|>"),
    needed_tokens=("<|plugin|>",),
    parse=parse,
    tag=partial(_one_tag, arguments_name="parameters"),
    tells=("<|action_start|>", "<|plugin|>"),
)
INKLING = CallFormat(
    markers=("<|content_invoke_tool_json|>", "<|end_message|>"),
    content_marks=(("<|message_model|>", "<|content_text|>"), ("<|end_message|>",)),
    header_start="<|message_model|>",
    parse=parse,
    tag=partial(_one_tag, arguments_name="args", before="<|message_model|>"),
    tells=("<|content_invoke_tool_json|>",),
)
GIGACHAT3 = CallFormat(
    opening=f"function call{_ROLE}",
    opens_anywhere=True,
    optional_markers=(_GIGACHAT_CALL, ""),
    needed_tokens=(_ROLE,),
    parse=partial(_parse_behind, head=_GIGACHAT_HEAD),
    tag=_gigachat_tag,
    delimiters=_GIGACHAT_TOKENS,
    tells=(_ROLE, "function call"),
)
HUNYUAN = CallFormat(
    opening="<tool_calls>",
    opening_pattern=opening_followed_by("<tool_calls>", r"\["),
    closing="</tool_calls>",
    opens_anywhere=True,
    parse=partial(inside, opening="<tool_calls>", closing="</tool_calls>", parse=parse),
    tag=lambda _, __, vocabulary: _text_tag(
        vocabulary, "<tool_calls>", "</tool_calls>", '"[" function "]"', '"[" function (/, ?/ function)* "]"'
    ),
    delimiters=("<tool_calls>", "</tool_calls>"),
    tells=("<tool_calls>", "<answer>"),
)
GRANITE_20B = CallFormat(
    opening="<function_call>",
    opening_pattern=opening_followed_by("<function_call>", r"\{"),
    opens_anywhere=True,
    parse=partial(inside, opening="<function_call>", closing="", parse=partial(_parse_behind, head=_GRANITE_HEAD)),
    tag=lambda _, __, vocabulary: _text_tag(
        vocabulary,
        "<function_call>",
        "",
        '" "? function',
        f'" "? function (/ ?/ {delimiter_rule("<function_call>", vocabulary)} " "? function)*',
    ),
    delimiters=("<function_call>",),
    tells=("<function_call>", "<|function_call_library|>"),
)
