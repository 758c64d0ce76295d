"""A model's tool call is either one that can be made or no call at all, whatever the parser of its format returns."""

from collections.abc import Callable
from typing import Any

import pytest

from scorepool.engine.text.chat.chat_format import ChatFormat
from scorepool.engine.text.chat.tool_parser import MAX_CALL_BYTES, ParsedCall, parse_tool_calls
from tests.chat_formats import TOOLS, chat_codec_of


def parse(parser: Callable[[str, Any], Any], text: bytes = b"text", tools: Any = TOOLS) -> list[ParsedCall]:
    return parse_tool_calls(ChatFormat(transitions={}, tool_parser=parser), (), text, tools)


def test_arguments_are_json_in_every_format():
    assert parse(lambda *_: {"name": "look", "arguments": {"place": "Zürich", "x": [1, None]}}) == [
        ParsedCall(None, "look", '{"place": "Zürich", "x": [1, null]}')
    ]
    assert parse(lambda *_: {"name": "look", "arguments": '{"x": 1}', "id": "a"}) == [
        ParsedCall("a", "look", '{"x": 1}')
    ]


@pytest.mark.parametrize(
    "returned",
    [
        {"name": "look"},
        {"arguments": {}},
        {"name": "fly", "arguments": {}},
        {"name": ["look"], "arguments": {}},
        {"name": "look", "arguments": [1]},
        {"name": "look", "arguments": "[1]"},
        {"name": "look", "arguments": "Zürich"},
        {"name": "look", "arguments": {"x": {1, 2}}},  # the pythonic parser reads Python
        {"name": "look", "arguments": {"x": float("nan")}},
        {"name": "look", "arguments": {"place": "\ud800"}},
        {"name": "look", "arguments": {}, "id": 5},
        [{"name": "look", "arguments": {}}, {"name": "fly", "arguments": {}}],
        [],
        None,
        "look",
    ],
)
def test_anything_but_a_call_of_an_offered_function_is_no_call(returned: object):
    assert parse(lambda *_: returned) == []


@pytest.mark.parametrize("error", [ValueError, AttributeError, IndexError, RecursionError, MemoryError])
def test_a_parser_that_raises_has_found_no_call(error: type[Exception]):
    def fails(*_: object) -> None:
        raise error

    assert parse(fails) == []


@pytest.mark.parametrize("text", [b"a" * (MAX_CALL_BYTES + 1), b"call:f{" * 2000, b"<arg_key>" * 2000])
def test_a_text_that_takes_minutes_to_parse_is_not_parsed(text: bytes):
    parsed: list[object] = []

    assert parse(lambda *given: parsed.append(given), text) == []
    assert parsed == []


def test_a_large_call_is_parsed():
    text = f'{{"name": "look", "arguments": {{"place": "{"call: me " * 20 + "x" * 60_000}"}}}}'

    (call,) = parse_tool_calls(chat_codec_of("json_tools").chat_format, (), text.encode(), TOOLS)

    assert len(call.arguments) > 60_000


@pytest.mark.parametrize("text", [b"[" * 60_000, b'{"a":' * 10_000, b"[look(x=" + b"(" * 50_000, b"\xff\xfe"])
@pytest.mark.parametrize("name", ["json_tools", "glm47", "pythonic", "mistral"])
def test_deep_nesting_and_invalid_utf8_are_no_call(name: str, text: bytes):
    assert parse_tool_calls(chat_codec_of(name).chat_format, (), text, TOOLS) == []
