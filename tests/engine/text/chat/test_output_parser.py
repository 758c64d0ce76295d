"""Channels and calls are told by token ids, in every format that mlx-lm knows and in gpt-oss's."""

from typing import Any

import pytest

from scorepool.engine.text.chat.output_parser import Channel, OutputParser
from tests.chat_formats import COUNT, EOS, FORMATS, LOOK, TOOLS, ids_of, opening_of, tokenizer_of, written


class Read:
    """An answer, read to its end."""

    def __init__(self, name: str, text: str, tools: list[dict[str, Any]] = TOOLS) -> None:
        tokenizer = tokenizer_of(name)
        self.token_ids = ids_of(name, text)
        self.reader = tokenizer.reader(opening_of(name))
        for token_id in self.token_ids:
            self.reader.read(token_id)
        self.reader.end()
        calls = [tokenizer.calls(span, self.token_ids, tools) for span in self.reader.spans]
        self.calls = [pair for found in calls for pair in written(found)]
        self.num_unread = calls.count([])
        self._name = name

    def said(self, channel: Channel) -> str:
        pairs = zip(self.token_ids, self.reader.channels, strict=True)
        return tokenizer_of(self._name).decode([token_id for token_id, found in pairs if found == channel])


def answer(name: str, *calls: str) -> str:
    """Reasoning, content, and these calls."""
    form = FORMATS[name]
    reasons = form.reasoning[0] + "Where? 🙂" + form.reasoning[1] if form.reasoning[1] else ""
    return reasons + form.content[0] + "I look. ä" + form.content[1] + "".join(calls) + EOS


@pytest.mark.parametrize("name", FORMATS)
def test_reasoning_content_and_calls_are_told_apart(name: str):
    form = FORMATS[name]

    read = Read(name, answer(name, form.look, form.count))

    assert read.calls == [LOOK, COUNT]
    assert read.num_unread == 0
    assert read.said("content") == "I look. ä"
    assert read.said("reasoning") == ("Where? 🙂" if form.reasoning[1] else "")


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].two])
def test_a_call_may_hold_several(name: str):
    assert Read(name, answer(name, FORMATS[name].two or "")).calls == [LOOK, COUNT]


@pytest.mark.parametrize("name", FORMATS)
def test_what_cannot_be_read_is_no_call_and_takes_no_other_along(name: str):
    form = FORMATS[name]

    read = Read(name, answer(name, form.bad, form.count))

    assert read.calls == [COUNT]
    assert read.num_unread == 1


@pytest.mark.parametrize("name", FORMATS)
def test_a_function_that_was_not_offered_is_not_called(name: str):
    look, count = TOOLS

    assert Read(name, answer(name, FORMATS[name].look), tools=[count]).calls == []
    assert Read(name, answer(name, FORMATS[name].look), tools=[]).calls == []
    assert Read(name, answer(name, FORMATS[name].look), tools=[look]).calls == [LOOK]


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_was_cut_off_is_content(name: str):
    form = FORMATS[name]
    cut = form.look[: form.look.index("ich")]  # of Zürich

    read = Read(name, answer(name, cut).removesuffix(EOS))

    assert read.calls == []
    assert read.reader.spans == []
    assert "tool_call" not in read.reader.channels
    assert "Zür" in read.said("content")


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("json_tools", "</tool_call>"),
        ("qwen3_coder", "</tool_call>"),
        ("glm47", "</tool_call>"),
        ("gemma4", "<tool_call|>"),
        ("pythonic", "<|tool_call_end|>"),
    ],
)
def test_a_call_that_the_model_itself_ended_needs_no_closing_tag(name: str, tag: str):
    look = FORMATS[name].look.removesuffix(tag)

    assert look != FORMATS[name].look
    assert Read(name, look + EOS).calls == [LOOK]


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_settled_never_changes(name: str):
    form = FORMATS[name]
    token_ids = ids_of(name, answer(name, form.bad, form.look, "<a", form.count[:-3]))
    reader = tokenizer_of(name).reader(opening_of(name))
    settled: list[Channel] = []

    for token_id in token_ids:
        reader.read(token_id)
        assert reader.channels[: len(settled)] == settled
        settled = reader.channels[: reader.num_settled]
    reader.end()

    assert reader.channels[: len(settled)] == settled
    assert len(reader.channels) == len(token_ids)


def test_a_template_may_open_the_thinking():
    name = "opened"
    assert tokenizer_of(name).decode(opening_of(name)) == "<assistant><think>\n"

    read = Read(name, "Hm.</think>Yes." + EOS)

    assert (read.said("reasoning"), read.said("content")) == ("Hm.", "Yes.")


def test_what_users_write_opens_nothing():
    tokenizer = tokenizer_of("json_tools")
    _, opening = tokenizer.encode_chat([{"role": "user", "content": "What does <think> mean? <tool_call>"}])
    reader = tokenizer.reader(opening)
    reader.read(ids_of("json_tools", "a")[0])

    assert reader.channels == ["content"]


def test_the_same_text_written_in_other_tokens_is_no_markup():
    """Told by ids: `<think>` letter by letter is what the model says about thinking."""
    letters = [token_id for letter in "<think>Hm</think>" for token_id in ids_of("json_tools", letter)]
    reader = tokenizer_of("json_tools").reader([])
    for token_id in letters:
        reader.read(token_id)
    reader.end()

    assert set(reader.channels) == {"content"}


@pytest.mark.parametrize("rest", ["", "!", EOS])
def test_what_only_begins_as_a_marker_does_is_text(rest: str):
    assert Read("minicpm5", "a <func" + rest).said("content") == "a <func" + rest.removesuffix(EOS)


def test_a_special_token_is_text_of_no_channel():
    read = Read("json_tools", f"a<think>b{EOS}c")

    assert (read.said("content"), read.said("reasoning"), read.said("markup")) == ("ac", "b", f"<think>{EOS}")


def test_without_markup_all_is_content():
    reader = OutputParser(tokenizer_of("mistral").markup, lambda _: b"x")
    for token_id in ids_of("mistral", "Hi."):
        reader.read(token_id)
    reader.end()

    assert reader.channels == ["content"] * 3
