"""Functionary's calls: of v3.1 in tags, of v3.2 after the name of their recipient. No MLX.

<function=look>{"place": "Zürich"}</function>

all                                     the prompt ends with >>>
I look.>>>look
{"place": "Zürich"}>>>count_up
{"x": 1}

"""

import json
import re
from typing import Any

from scorepool.engine.text.chat.call_formats.call_format import (
    Call,
    CallFormat,
    ToolCallTag,
    check_name,
    literal,
    text_and_opening,
)

_TAG = re.compile(r"\s*<function=(?P<name>[^<>\s]+)>")
_TAG_END = re.compile(r"\s*</function>")
_NAME = re.compile(r"[\w.-]+")
_RECIPIENT = re.compile(r"(?:>>>)?(?P<name>[\w.-]+)\n")
_SPACE = re.compile(r"\s*")
_GROWING = re.compile(rb">>>((?P<header>all\n)|[\w.-]*$|[\w.-]+\n\s*($|(?P<opened>\{)))")


def _parse_tags(text: str, _: Any) -> list[Call]:
    """Return the calls of <function=name>{...}</function>, one after the other. Raises ValueError."""
    return _parse(text, _TAG, _TAG_END)


def _parse_recipients(text: str, _: Any) -> list[Call]:
    """Return the calls of >>>name and an object, one after the other. Raises ValueError.

    The first token may begin before the first of them, and the prompt may have opened it.
    """
    before, found, rest = text.partition(">>>")
    is_in_token = found and "\n" not in before and _RECIPIENT.match(rest)
    return _parse(rest if is_in_token else text, _RECIPIENT, _SPACE)


def _parse(text: str, beginning: re.Pattern[str], ending: re.Pattern[str]) -> list[Call]:
    calls, decoder, at = list[Call](), json.JSONDecoder(), 0
    while begin := beginning.match(text, at):
        arguments, at = decoder.raw_decode(text, _SPACE.match(text, begin.end()).end())  # type: ignore[union-attr]
        end = ending.match(text, at)
        if end is None:
            raise ValueError("a call has no end")
        calls.append({"name": begin["name"], "arguments": arguments})
        at = end.end()
    if text[at:].strip():
        raise ValueError("a text follows the calls")
    return calls


def _tag_of_tags(*_: Any) -> ToolCallTag:
    return ToolCallTag(
        call_of=lambda name, arguments: f'{literal(f"<function={name}>")} {arguments} "</function>"',
        one="function",
        several="function+",
    )


def _tag_of_recipients(*_: Any) -> ToolCallTag:
    def call_of(name: str, arguments: str) -> str:
        check_name(name, _NAME, "letters, digits, _, . and -")
        return f"{literal(name + chr(10))} {arguments}"

    return ToolCallTag(
        call_of=call_of,
        one="function",
        several='function (">>>" function)*',
        text_and_opening=text_and_opening(">>>", (), {}),
        header=literal("all\n"),
    )


V31 = CallFormat(
    opening="<function=",
    parse=_parse_tags,
    tag=_tag_of_tags,
    tells=("<|start_header_id|>", "<function=example_function_name>"),
)
V32 = CallFormat(
    opening=">>>",
    opening_pattern=_GROWING,
    opens_anywhere=True,
    parse=_parse_recipients,
    tag=_tag_of_recipients,
    tells=("<|start_header_id|>", ">>>all"),
)
