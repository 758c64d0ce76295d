"""What a model wrote as a call is one that can be made, or none: whatever the parser of its format makes of it."""

from collections.abc import Callable
from typing import Any

import pytest

from scorepool.engine.text.chat.chat_format import ChatFormat
from scorepool.engine.text.chat.tool_parser import MAX_CALL_BYTES, Call, read_calls
from tests.chat_formats import TOOLS, tokenizer_of


def parsed(parser: Callable[[str, Any], Any], text: bytes = b"text", tools: Any = TOOLS) -> list[Call]:
    return read_calls(ChatFormat(moves={}, parser=parser), (), text, tools)


def test_arguments_are_json_whatever_the_format():
    assert parsed(lambda *_: {"name": "look", "arguments": {"place": "Zürich", "x": [1, None]}}) == [
        Call(None, "look", '{"place": "Zürich", "x": [1, null]}')
    ]
    assert parsed(lambda *_: {"name": "look", "arguments": '{"x": 1}', "id": "a"}) == [Call("a", "look", '{"x": 1}')]


@pytest.mark.parametrize(
    "found",
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
def test_what_is_no_call_of_an_offered_function_is_none(found: object):
    assert parsed(lambda *_: found) == []


@pytest.mark.parametrize("error", [ValueError, AttributeError, IndexError, RecursionError, MemoryError])
def test_whatever_a_parser_raises_is_no_call(error: type[Exception]):
    def fails(*_: object) -> None:
        raise error

    assert parsed(fails) == []


@pytest.mark.parametrize("text", [b"a" * (MAX_CALL_BYTES + 1), b"call:f{" * 2000, b"<arg_key>" * 2000])
def test_a_text_that_would_take_minutes_is_not_parsed(text: bytes):
    read = []

    assert parsed(lambda *given: read.append(given), text) == []
    assert read == []


def test_a_large_call_is_read():
    text = f'{{"name": "look", "arguments": {{"place": "{"call: me " * 20 + "x" * 60_000}"}}}}'

    (call,) = read_calls(tokenizer_of("json_tools").markup, (), text.encode(), TOOLS)

    assert len(call.arguments) > 60_000


@pytest.mark.parametrize("text", [b"[" * 60_000, b'{"a":' * 10_000, b"[look(x=" + b"(" * 50_000, b"\xff\xfe"])
@pytest.mark.parametrize("name", ["json_tools", "glm47", "pythonic", "mistral"])
def test_depths_and_bytes_break_nothing(name: str, text: bytes):
    assert read_calls(tokenizer_of(name).markup, (), text, TOOLS) == []
