"""Channels and calls are found by token ids, in every format that mlx-lm knows and in gpt-oss's."""

from typing import Any

import pytest

from scorepool.engine.text.chat.output_parser import Channel, OutputParser
from tests.chat_formats import (
    COUNT,
    EOS,
    FORMATS,
    LOOK,
    TOOLS,
    chat_codec_of,
    generation_prompt_of,
    ids_of,
    names_and_arguments,
)


class ParsedAnswer:
    """An answer that was parsed to its end."""

    def __init__(self, name: str, text: str, tools: list[dict[str, Any]] = TOOLS) -> None:
        self._chat = chat_codec_of(name)
        self.token_ids = ids_of(name, text)
        self.parser = self._chat.output_parser(generation_prompt_of(name))
        for token_id in self.token_ids:
            self.parser.read(token_id)
        self.parser.end()
        calls = [self._chat.parse_tool_calls(span, self.token_ids, tools) for span in self.parser.spans]
        self.calls = [pair for parsed in calls for pair in names_and_arguments(parsed)]
        self.num_unparsed = calls.count([])

    def text_of(self, channel: Channel) -> str:
        pairs = zip(self.token_ids, self.parser.channels, strict=True)
        return self._chat.tokenizer.decode([token_id for token_id, found in pairs if found == channel])


def answer(name: str, *calls: str) -> str:
    """Return the text of an answer with reasoning, content, and these calls."""
    sample = FORMATS[name]
    reasoning = sample.reasoning[0] + "Where? 🙂" + sample.reasoning[1] if sample.reasoning[1] else ""
    return reasoning + sample.content[0] + "I look. ä" + sample.content[1] + "".join(calls) + EOS


@pytest.mark.parametrize("name", FORMATS)
def test_reasoning_content_and_calls_are_separated(name: str):
    sample = FORMATS[name]

    parsed = ParsedAnswer(name, answer(name, sample.look, sample.count))

    assert parsed.calls == [LOOK, COUNT]
    assert parsed.num_unparsed == 0
    assert parsed.text_of("content") == "I look. ä"
    assert parsed.text_of("reasoning") == ("Where? 🙂" if sample.reasoning[1] else "")


@pytest.mark.parametrize("name", ["json_tools", "qwen3_coder", "glm47", "minimax_m2", "deepseek_v3", "gemma4"])
def test_spaces_between_calls_and_after_them_are_no_content(name: str):
    """Templates write a line's end between calls. The content beside calls alone is null, as OpenAI's is."""
    sample = FORMATS[name]

    assert ParsedAnswer(name, f"{sample.look}\n{sample.count} \n{EOS}").text_of("content") == ""
    assert ParsedAnswer(name, f"Hi.\n{sample.look}\n{sample.count}\nSo 1 2.{EOS}").text_of("content") == "Hi.\nSo 1 2."


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].both])
def test_one_span_may_hold_several_calls(name: str):
    assert ParsedAnswer(name, answer(name, FORMATS[name].both or "")).calls == [LOOK, COUNT]


@pytest.mark.parametrize("name", FORMATS)
def test_text_that_cannot_be_parsed_is_no_call_and_spoils_no_other_call(name: str):
    sample = FORMATS[name]

    parsed = ParsedAnswer(name, answer(name, sample.invalid, sample.count))

    assert parsed.calls == [COUNT]
    assert parsed.num_unparsed == 1


@pytest.mark.parametrize("name", FORMATS)
def test_a_function_that_was_not_offered_is_not_called(name: str):
    look, count = TOOLS

    assert ParsedAnswer(name, answer(name, FORMATS[name].look), tools=[count]).calls == []
    assert ParsedAnswer(name, answer(name, FORMATS[name].look), tools=[]).calls == []
    assert ParsedAnswer(name, answer(name, FORMATS[name].look), tools=[look]).calls == [LOOK]


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_was_cut_off_is_content(name: str):
    sample = FORMATS[name]
    cut = sample.look[: sample.look.index("ich")]  # of Zürich

    parsed = ParsedAnswer(name, answer(name, cut).removesuffix(EOS))

    assert parsed.calls == []
    assert parsed.parser.spans == []
    assert "tool_call" not in parsed.parser.channels
    assert "Zür" in parsed.text_of("content")


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("json_tools", "</tool_call>"),
        ("qwen3_coder", "</tool_call>"),
        ("glm47", "</tool_call>"),
        ("gemma4", "<tool_call|>"),
        ("lfm2", "<|tool_call_end|>"),
    ],
)
def test_a_call_that_ends_with_the_turn_needs_no_closing_tag(name: str, tag: str):
    look = FORMATS[name].look.removesuffix(tag)

    assert look != FORMATS[name].look
    assert ParsedAnswer(name, look + EOS).calls == [LOOK]


@pytest.mark.parametrize("name", FORMATS)
def test_final_channels_never_change(name: str):
    sample = FORMATS[name]
    token_ids = ids_of(name, answer(name, sample.invalid, sample.look, "<a", sample.count[:-3]))
    parser = chat_codec_of(name).output_parser(generation_prompt_of(name))
    final: list[Channel] = []

    for token_id in token_ids:
        parser.read(token_id)
        assert parser.channels[: len(final)] == final
        final = parser.channels[: parser.num_final]
    parser.end()

    assert parser.channels[: len(final)] == final
    assert len(parser.channels) == len(token_ids)


def test_a_template_may_open_the_reasoning():
    name = "opened"
    assert chat_codec_of(name).tokenizer.decode(generation_prompt_of(name)) == "<assistant><think>\n"

    parsed = ParsedAnswer(name, "Hm.</think>Yes." + EOS)

    assert (parsed.text_of("reasoning"), parsed.text_of("content")) == ("Hm.", "Yes.")


def test_markers_in_a_users_message_open_nothing():
    chat = chat_codec_of("json_tools")
    _, generation_prompt = chat.encode([{"role": "user", "content": "What does <think> mean? <tool_call>"}])
    parser = chat.output_parser(generation_prompt)
    parser.read(ids_of("json_tools", "a")[0])

    assert parser.channels == ["content"]


def test_a_marker_spelled_in_other_tokens_is_text():
    """`<think>` letter by letter is text about thinking: markers are recognised by their ids."""
    letters = [token_id for letter in "<think>Hm</think>" for token_id in ids_of("json_tools", letter)]
    parser = chat_codec_of("json_tools").output_parser([])
    for token_id in letters:
        parser.read(token_id)
    parser.end()

    assert set(parser.channels) == {"content"}


@pytest.mark.parametrize("rest", ["", "!", EOS])
def test_an_incomplete_marker_is_text(rest: str):
    assert ParsedAnswer("minicpm5", "a <func" + rest).text_of("content") == "a <func" + rest.removesuffix(EOS)


def test_a_special_token_adds_text_to_no_channel():
    parsed = ParsedAnswer("json_tools", f"a<think>b{EOS}c")

    assert (parsed.text_of("content"), parsed.text_of("reasoning"), parsed.text_of("markup")) == (
        "ac",
        "b",
        f"<think>{EOS}",
    )


def test_without_markers_every_token_is_content():
    parser = OutputParser(chat_codec_of("mistral").chat_format, lambda _: b"x")
    for token_id in ids_of("mistral", "Hi."):
        parser.read(token_id)
    parser.end()

    assert parser.channels == ["content"] * 3
