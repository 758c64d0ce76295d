"""Calls that begin with a text without a token of its own are found anywhere, however it is cut into tokens."""

import pytest

from scorepool.engine.text.chat.chat_format import ChatFormat
from scorepool.engine.text.chat.output_parser import MAX_HELD_BYTES, OutputParser
from tests.chat_formats import (
    COUNT,
    EOS,
    LOOK,
    TEXT_FORMATS,
    TOOLS,
    chat_codec_of,
    generation_prompt_of,
    ids_of,
    names_and_arguments,
)
from tests.engine.text.chat.test_output_parser import ParsedAnswer


def answer(name: str, *calls: str) -> str:
    """Return the text of an answer with reasoning, content and these calls."""
    sample = TEXT_FORMATS[name]
    reasoning = sample.reasoning[0] + "Where? 🙂" + sample.reasoning[1] if sample.reasoning[1] else ""
    content = sample.content[0] + "I look. ä" + sample.content[1]
    return (reasoning + content + "".join(calls) + EOS).removeprefix(sample.opened)


@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_reasoning_content_and_calls_are_separated(name: str):
    sample = TEXT_FORMATS[name]
    for calls in ([sample.both or ""], [sample.look, sample.count]):
        parsed = ParsedAnswer(name, answer(name, *calls))
        assert parsed.calls == [LOOK, COUNT]
        assert parsed.text_of("content") == "I look. ä"
        assert parsed.text_of("reasoning") == ("Where? 🙂" if sample.reasoning[1] else "")


@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_an_answer_may_be_a_call_alone(name: str):
    sample = TEXT_FORMATS[name]
    parsed = ParsedAnswer(name, (sample.look + EOS).removeprefix(sample.opened))
    assert (parsed.calls, parsed.text_of("content")) == ([LOOK], "")


@pytest.mark.parametrize("name", [name for name in TEXT_FORMATS if chat_codec_of(name).chat_format.call_text.closing])  # type: ignore[union-attr]
def test_a_call_that_cannot_be_parsed_is_content_and_spoils_no_other(name: str):
    sample = TEXT_FORMATS[name]
    parsed = ParsedAnswer(name, answer(name, sample.invalid, sample.count))
    assert parsed.calls == [COUNT]
    assert parsed.num_unparsed <= 1  # what is no call by its first character is content at once
    assert parsed.text_of("content").startswith("I look. ä")


@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_what_begins_as_a_call_and_is_none_is_content(name: str):
    sample = TEXT_FORMATS[name]
    opening = sample.look[: len(sample.opened) or 5]
    for text in (sample.invalid, sample.look[: sample.look.index("ich")], f"{opening}?", f"a {opening} b"):
        parsed = ParsedAnswer(name, answer(name, text))
        assert parsed.calls == []
        assert parsed.text_of("content").startswith("I look. ä")
    assert ParsedAnswer(name, answer(name, "1 < 2 > 1 >> 0")).text_of("content") == "I look. ä1 < 2 > 1 >> 0"


@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_final_channels_never_change(name: str):
    sample = TEXT_FORMATS[name]
    for calls in ([sample.both or ""], [sample.invalid, sample.look], [sample.look[:4], "<a", sample.count]):
        token_ids = ids_of(name, answer(name, *calls))
        parser = chat_codec_of(name).output_parser(generation_prompt_of(name))
        final: list[str] = []
        for token_id in token_ids:
            parser.read(token_id)
            assert parser.channels[: len(final)] == final
            final = list(parser.channels[: parser.num_final])
        parser.end()
        assert parser.channels[: len(final)] == final
        assert len(parser.channels) == len(token_ids)


@pytest.mark.parametrize("name", sorted(TEXT_FORMATS.keys() - {"gigachat3"}))  # whose marks are tokens
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_markers_may_lie_across_tokens(name: str, size: int):
    """Tokens of many bytes, some of which hold the end of a text and the beginning of a marker."""
    chat, sample = chat_codec_of(name), TEXT_FORMATS[name]
    text = (sample.content[0] + "I look." + (sample.both or "")).removeprefix(sample.opened).encode()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    prompt, eos = len(pieces), len(pieces) + 1
    vocabulary = [*pieces, sample.opened.encode(), b""]
    chat_format = ChatFormat(transitions={}, call_text=chat.chat_format.call_text, eos_ids=frozenset([eos]))
    parser = OutputParser(chat_format, vocabulary.__getitem__, [prompt])
    for number in [*range(len(pieces)), eos]:
        parser.read(number)
    parse = chat.chat_format.tool_parser
    assert parse is not None
    texts = [b"".join(pieces[span.start : span.end]).decode() for span in parser.spans]
    parsed = [call for text in texts for call in parse(text, TOOLS)]
    assert [(call["name"], call["arguments"]) for call in parsed] == [LOOK, COUNT]
    content = b"".join(
        piece for piece, channel in zip(pieces, parser.channels[:-1], strict=True) if channel == "content"
    )
    assert b"I look.".startswith(content.removeprefix(b"all").lstrip())
    assert len(content.lstrip()) > 7 - size


@pytest.mark.parametrize(
    ("name", "text"), [("functionary_v32", ">>>" + "a" * 50_000), ("olmo3", "<function_calls>" + " " * 50_000)]
)
def test_a_beginning_of_a_call_is_held_up_to_a_bound(name: str, text: str):
    codec = chat_codec_of(name)
    parser = codec.output_parser([])
    for number, token_id in enumerate(ids_of(name, text)):
        parser.read(token_id)
        assert number - parser.num_final <= MAX_HELD_BYTES
    parser.end()
    assert set(parser.channels) == {"content"}


def test_functionary_marks_content_too_and_the_mark_is_no_content():
    for tools in (TOOLS, []):
        parsed = ParsedAnswer("functionary_v32", "all\nHi >>> 1\n" + EOS, tools=tools)
        assert (parsed.text_of("content"), parsed.calls) == ("Hi >>> 1\n", [])
    chat = chat_codec_of("functionary_v32")
    parser = chat.output_parser(generation_prompt_of("functionary_v32"), may_call=False)
    ids = ids_of("functionary_v32", 'all\nHi>>>look\n{"x": 1}')
    for token_id in ids:
        parser.read(token_id)
    parser.end()
    assert parser.channels == ["markup"] * 4 + ["content"] * (len(ids) - 4)


def test_deepseek_says_what_is_a_string():
    tools = [
        {
            "type": "function",
            "function": {
                "name": "look",
                "parameters": {"properties": {"a": {}, "b": {"type": "string"}, "c": {"type": "integer"}}},
            },
        }
    ]
    chat = chat_codec_of("deepseek_v32")
    for kind, arguments in (("true", {"a": "5", "b": "5", "c": 5}), ("false", {"a": 5, "b": "5", "c": 5})):
        pairs = "".join(f'<｜DSML｜parameter name="{key}" string="{kind}">5</｜DSML｜parameter>' for key in "abc")
        ids = ids_of("deepseek_v32", f'<｜DSML｜function_calls><｜DSML｜invoke name="look">{pairs}</｜DSML｜invoke>')
        parser = chat.output_parser([])
        for token_id in [*ids, *ids_of("deepseek_v32", EOS)]:
            parser.read(token_id)
        (span,) = parser.spans
        assert names_and_arguments(chat.parse_tool_calls(span, ids, tools)) == [("look", arguments)]
