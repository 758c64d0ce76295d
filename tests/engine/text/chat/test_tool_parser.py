"""A model's tool call is either one that can be made or no call at all, whatever the parser of its format returns."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from scorepool.engine.text.chat.chat_format import ChatFormat
from scorepool.engine.text.chat.tool_parser import MAX_CALL_BYTES, MAX_FOREIGN_BYTES, ParsedCall, parse_tool_calls
from tests.chat_formats import EOS, SAMPLES, TOOLS, chat_codec_of, generation_prompt_of


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


def test_a_text_that_takes_minutes_to_parse_is_not_parsed():
    parsed: list[object] = []
    assert parse(lambda *given: parsed.append(given), b"a" * (MAX_CALL_BYTES + 1)) == []
    assert parsed == []


@pytest.mark.parametrize("text", [b"[ARGS]{" * 2000, b"a" * (MAX_FOREIGN_BYTES + 1)])
def test_texts_that_take_minutes_are_not_given_to_mlx_lm(text: bytes):
    parsed: list[object] = []

    def foreign(*given: object) -> None:
        parsed.append(given)

    foreign.__module__ = "mlx_lm.tool_parsers.mistral"
    assert parse(foreign, text) == []
    assert parsed == []


def test_a_large_call_is_parsed():
    text = f'{{"name": "look", "arguments": {{"place": "{"call: me " * 20 + "x" * 100_000}"}}}}'

    (call,) = parse_tool_calls(chat_codec_of("json_tools").chat_format, (), text.encode(), TOOLS)

    assert len(call.arguments) > 100_000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<function=look" + " " * 200_000),
        ("qwen3_coder", "<function=look>\n<parameter=place>\n" + "</parameter>x" * 15_000),
        ("qwen3_coder", "<function=look>\n<parameter=place>" * 6_000),
        ("kimi_k2", " " * 200_000),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" * 4_000),
        ("glm47", "look" + "<arg_key>x</arg_key><arg_value>1" * 7_000),
        ("solar_open2", "look\n" + "<|tool_arg:start|>x<|tool_arg:value|>1" * 6_000),
        ("minicpm5", '<function name="look' + "=" * 200_000),
        ("pythonic", "[look(x=" + "'\\" * 100_000),
        ("step3", " " * 100_000),
    ],
)
def test_texts_that_end_nothing_take_linear_time(name: str, text: str):
    """They took minutes. A second is a hundred times what they take."""
    started_at = time.process_time()
    assert parse_tool_calls(chat_codec_of(name).chat_format, (), text.encode(), TOOLS) == []
    assert time.process_time() - started_at < 1


@pytest.mark.parametrize("name", ["json_tools", "qwen3_coder", "deepseek_v32", "functionary_v32", "minimax_m3"])
def test_reading_long_arguments_token_by_token_takes_linear_time(name: str):
    """100 KB in tokens of one byte take 0.2 s; quadratic reading would take minutes."""
    sample, chat = SAMPLES[name], chat_codec_of(name)
    text = sample.look.replace("Zürich", "x<y> " * 20_000)
    ids = chat.tokenizer.encode((text + EOS).removeprefix(sample.opened), add_bos=False)[0]
    parser = chat.output_parser(generation_prompt_of(name))
    started_at = time.process_time()
    for token_id in ids:
        parser.read(token_id)
    calls = [call for span in parser.spans for call in chat.parse_tool_calls(span, ids, TOOLS)]
    assert time.process_time() - started_at < 3
    assert [len(json.loads(call.arguments)["place"]) for call in calls] == [100_000]


@pytest.mark.parametrize("text", [b"[" * 60_000, b'{"a":' * 10_000, b"[look(x=" + b"(" * 50_000, b"\xff\xfe"])
@pytest.mark.parametrize("name", ["json_tools", "glm47", "pythonic", "mistral"])
def test_deep_nesting_and_invalid_utf8_are_no_call(name: str, text: bytes):
    assert parse_tool_calls(chat_codec_of(name).chat_format, (), text, TOOLS) == []


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "minimax_m2", "minimax_m3", "seed_oss", "step3", "minicpm5"])
@pytest.mark.parametrize(
    "written",
    ["{1, 2}", "[...]", "[1+2j]", "{'a': b'x'}", "{[1]: 2}", "1e999", "[-1e400]", "NaN", '["\\ud800"]', "[" * 3000],
)
@pytest.mark.parametrize("schema", [{}, {"type": ["string", "number", "array", "object"]}])
def test_a_text_that_is_no_value_of_json_is_a_string_where_one_is_allowed(
    name: str, written: str, schema: dict[str, Any]
):
    """Python reads some of them as values that no JSON has: the calls were lost."""
    sample, chat = SAMPLES[name], chat_codec_of(name)
    function = {"name": "look", "parameters": {"type": "object", "properties": {"place": schema}}}
    text = sample.look.replace("Zürich", written) + EOS
    ids = chat.tokenizer.encode(text.removeprefix(sample.opened), add_bos=False)[0]
    parser = chat.output_parser(generation_prompt_of(name))
    for token_id in ids:
        parser.read(token_id)
    calls = [call for span in parser.spans for call in chat.parse_tool_calls(span, ids, [{"function": function}])]

    assert [json.loads(call.arguments) for call in calls] == [{"place": written}]
