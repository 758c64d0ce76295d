"""Calls that begin with a text without a token of its own are found at the beginning of an answer, and only there."""

import pytest

from tests.chat_formats import COUNT, EOS, LOOK, OPENED_FORMATS, TOOLS, chat_codec_of, ids_of
from tests.engine.text.chat.test_output_parser import ParsedAnswer


@pytest.mark.parametrize("name", OPENED_FORMATS)
def test_an_answer_may_be_one_call_or_several(name: str):
    sample = OPENED_FORMATS[name]
    assert ParsedAnswer(name, sample.look + EOS).calls == [LOOK]
    parsed = ParsedAnswer(name, f"\n\n{sample.both}{EOS}")
    assert parsed.calls == [LOOK, COUNT]
    assert parsed.text_of("content").strip() == ""


@pytest.mark.parametrize("name", OPENED_FORMATS)
def test_a_call_after_content_is_content(name: str):
    text = f"I look. {OPENED_FORMATS[name].look}"
    parsed = ParsedAnswer(name, text + EOS)
    assert (parsed.calls, parsed.text_of("content")) == ([], text)


@pytest.mark.parametrize("name", OPENED_FORMATS)
def test_what_begins_as_a_call_and_is_none_is_content(name: str):
    sample = OPENED_FORMATS[name]
    for text in (sample.invalid, sample.look[:3], sample.look[: sample.look.index("ich")], "", "\n ", "fun", "<T"):
        parsed = ParsedAnswer(name, text + EOS)
        assert parsed.calls == []
        for token_ids, channels in ((parsed.token_ids, parsed.parser.channels),):
            assert len(token_ids) == len(channels)
    cut = sample.look[: sample.look.index("ich")]
    assert ParsedAnswer(name, cut).text_of("content") == cut


@pytest.mark.parametrize("name", OPENED_FORMATS)
def test_only_offered_functions_are_called_and_json_is_content_where_none_is(name: str):
    _, count = TOOLS
    assert ParsedAnswer(name, OPENED_FORMATS[name].look + EOS, tools=[count]).calls == []
    codec, ids = chat_codec_of(name), ids_of(name, OPENED_FORMATS[name].look)
    parser = codec.output_parser([], may_call=False)
    for number, token_id in enumerate(ids, 1):
        parser.read(token_id)
        assert parser.num_final == number  # nothing is held back
    assert set(parser.channels) == {"content"}


def test_a_call_may_follow_reasoning():
    sample = OPENED_FORMATS["nemotron_json"]
    parsed = ParsedAnswer("nemotron_json", f"<think>Where? {sample.look}</think>\n\n{sample.count}{EOS}")
    assert parsed.calls == [COUNT]
    assert parsed.text_of("reasoning") == f"Where? {sample.look}"


def test_llama_may_mark_a_call():
    sample = OPENED_FORMATS["llama3_json"]
    assert ParsedAnswer("llama3_json", f"<|python_tag|>{sample.both}{EOS}").calls == [LOOK, COUNT]


def test_llama4_may_mark_a_call():
    sample = OPENED_FORMATS["llama4_pythonic"]
    for text in (f"<|python_start|>{sample.both}<|python_end|>{EOS}", f"{sample.both}<|python_end|>{EOS}"):
        parsed = ParsedAnswer("llama4_pythonic", text)
        assert parsed.calls == [LOOK, COUNT]
        assert parsed.text_of("content") == ""


def test_a_list_that_is_no_call_is_not_held_back():
    codec = chat_codec_of("pythonic")
    for text, num_held in (
        ("[1, 2", 0),
        ("[Bern](x", 0),
        ("[]", 0),
        ("[look", 5),
        ("[ look ", 7),
        ("[look(", 6),
        ("[", 1),
    ):
        parser = codec.output_parser([])
        for token_id in ids_of("pythonic", text):
            parser.read(token_id)
        assert len(text) - parser.num_final == num_held, text


@pytest.mark.parametrize("name", OPENED_FORMATS)
def test_final_channels_never_change(name: str):
    sample = OPENED_FORMATS[name]
    for text in (sample.look, sample.invalid, f" {sample.look[:4]}x", sample.both or ""):
        parser = chat_codec_of(name).output_parser([])
        final: list[str] = []
        for token_id in ids_of(name, text + EOS):
            parser.read(token_id)
            assert parser.channels[: len(final)] == final
            final = list(parser.channels[: parser.num_final])
        parser.end()
        assert parser.channels[: len(final)] == final
