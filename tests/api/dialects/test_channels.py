"""A chat's answer from its tokens: what a stream adds up to is the whole reply. No process, no model."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scorepool import wire
from scorepool.api.dialects.anthropic.messages import MessagesRequest
from scorepool.api.dialects.anthropic.reply import ContentBlock, MessageWriter, to_message
from scorepool.api.dialects.openai.chat_reply import ChatChoice, ChatChoiceChunk
from scorepool.api.dialects.openai.response_object import OutputItem
from scorepool.api.dialects.openai.responses import ResponseRequest
from scorepool.api.dialects.openai.responses_reply import ResponseWriter, to_response
from tests.answered_chat import Run, joined
from tests.chat_formats import COUNT, EOS, FORMATS, LOOK, chat_codec_of, ids_of


def run(name: str, text: str, **options: Any) -> Run:
    return Run(chat_codec_of(name), ids_of(name, text), **options)


def assert_same(whole: ChatChoice, chunks: list[ChatChoiceChunk]) -> None:
    content, reasoning, calls, entries, finish_reason = joined(chunks)
    assert content == (whole.message.content or "")
    assert reasoning == (whole.message.reasoning_content or "")
    assert [(call.id, call.function) for call in calls] == [
        (call.id, call.function) for call in whole.message.tool_calls or ()
    ]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert entries == whole.logprobs.content
    assert finish_reason == whole.finish_reason
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    for chunk in chunks:  # some clients refuse two at once, which OpenAI never sends
        assert sum(map(bool, (chunk.delta.content, chunk.delta.reasoning_content, chunk.delta.tool_calls))) <= 1


def channel_text(choice: ChatChoice, channel: str) -> str:
    """Join the bytes of the tokens of a channel."""
    contents = [bytes(entry.bytes) for entry in choice.logprobs.content if entry.channel == channel]
    return b"".join(contents).decode(errors="replace")


@pytest.mark.parametrize("name", FORMATS)
def test_reasoning_content_and_calls_are_separated(name: str):
    chat_format = FORMATS[name]
    reasons = chat_format.reasoning[0] + "Hm ä" + chat_format.reasoning[1] if chat_format.reasoning[1] else ""
    content = chat_format.content[0] + "🙂" + chat_format.content[1]

    answered = run(name, reasons + content + chat_format.look + chat_format.count + EOS)

    message = answered.whole.message
    assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == [LOOK, COUNT]
    assert message.content == "🙂"
    assert (message.reasoning_content or "") == ("Hm ä" if reasons else "")
    assert answered.whole.finish_reason == "tool_calls"
    assert len(answered.whole.logprobs.content) == answered.result.usage.completion_tokens
    assert_same(answered.whole, answered.chunks(answered.deltas))
    assert len(answered.deltas) > 3  # it was streamed


def test_tokens_that_come_together_are_sent_by_their_channels():
    name = "json_tools"
    [start, end] = FORMATS[name].reasoning
    answered = run(name, f"{start}Hm{end}ä" + FORMATS[name].look + FORMATS[name].count + EOS)

    chunks = answered.chunks([])  # as a result comes from the cache

    kinds = [
        {name for name in ("reasoning_content", "content", "tool_calls") if getattr(chunk.delta, name)}
        for chunk in chunks
    ]
    assert kinds == [{"reasoning_content"}, {"content"}, {"tool_calls"}]
    assert_same(answered.whole, chunks)


def test_a_call_alone_has_no_content():
    answered = run("json_tools", FORMATS["json_tools"].look + EOS)

    assert answered.whole.message.content is None
    assert len(answered.whole.message.tool_calls[0].id) == 9


def test_a_malformed_call_is_content():
    answered = run("json_tools", "a" + FORMATS["json_tools"].invalid + EOS)

    assert answered.whole.message.content == 'a{"name": "look", "arguments": {'
    assert not answered.whole.message.tool_calls
    assert answered.whole.finish_reason == "stop"
    assert_same(answered.whole, answered.chunks(answered.deltas))


def test_a_call_is_streamed_whole():
    answered = run("json_tools", "Hi." + FORMATS["json_tools"].look + "b" + EOS)

    with_calls = [delta for delta in answered.deltas if delta.tool_calls]
    assert [delta.channels for delta in answered.deltas[:3]] == [["content"]] * 3
    assert len(with_calls) == 1
    assert {"tool_call", "markup"} == set(with_calls[0].channels)

    answered.job_stream.rewind(0, with_calls[0].tool_calls[0].entry)  # its last token
    (again,) = answered.job_stream.take(1)[0]
    assert (again.tool_calls, again.first) == (with_calls[0].tool_calls, len("Hi.") + 1)  # after its marker


def test_an_answer_cut_off_after_a_call_has_finish_reason_length():
    answered = run("json_tools", FORMATS["json_tools"].look + "b")

    assert answered.whole.finish_reason == "length"
    assert len(answered.whole.message.tool_calls) == 1


@pytest.mark.parametrize("options", [{"tool_choice": "none"}, {"tools": None}])
def test_without_tools_a_call_is_content(options: dict[str, Any]):
    answered = run("json_tools", FORMATS["json_tools"].count + EOS, **options)

    assert answered.whole.message.content == '{"name": "count_up", "arguments": {"x": 1}}'
    assert answered.whole.finish_reason == "stop"


def test_special_tokens_are_in_the_content_if_asked_for():
    """Special tokens that separate channels are in none, and the end token is not in the answer."""
    text = "a<escape>b" + FORMATS["function_gemma"].look + "c<escape>" + EOS

    left, kept = run("function_gemma", text), run("function_gemma", text, skip_special_tokens=False)

    assert (left.whole.message.content, kept.whole.message.content) == ("abc", "a<escape>bc<escape>")
    assert kept.whole.message.tool_calls == left.whole.message.tool_calls
    assert len(kept.whole.message.tool_calls) == 1
    for answered in (left, kept):
        assert_same(answered.whole, answered.chunks(answered.deltas))


def test_an_ignored_end_token_is_content_if_special_tokens_are():
    text = "a" + EOS + "b"
    ignored = {"ignore_eos": True, "max_tokens": 3}

    left, kept = run("json_tools", text, **ignored), run("json_tools", text, **ignored, skip_special_tokens=False)

    assert (left.whole.message.content, kept.whole.message.content) == ("ab", f"a{EOS}b")
    for answered in (left, kept):
        assert len(answered.whole.logprobs.content) == 3
        assert_same(answered.whole, answered.chunks(answered.deltas))


def test_two_equal_calls_have_two_ids():
    two = run("json_tools", FORMATS["json_tools"].look * 2 + EOS).whole.message.tool_calls
    again = run("json_tools", FORMATS["json_tools"].look * 2 + EOS).whole.message.tool_calls

    assert two[0].id != two[1].id
    assert two == again


def test_a_stop_string_may_cut_a_call():
    answered = run("json_tools", "a" + FORMATS["json_tools"].look + EOS, stop="place")

    assert answered.whole.message.content == 'a\n{"name": "look", "arguments": {"'
    assert answered.whole.finish_reason == "stop"
    assert_same(answered.whole, answered.chunks(answered.deltas))


RESPONSE = wire.parse(b'{"model": "m", "input": "Go.", "include": ["message.output_text.logprobs"]}', ResponseRequest)
MESSAGE = wire.parse(
    b'{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "Go."}]}', MessagesRequest
)
ID = "0" * 32


def streamed_items(answered: Run, deltas: Sequence[wire.TokenDelta], *, is_by_token: bool = False) -> list[OutputItem]:
    writer = ResponseWriter(RESPONSE, ID, 0, is_by_token=is_by_token)
    for event in (*deltas, ended(answered)):
        writer.add(event)
    return writer.ended(answered.result).output


def streamed_blocks(answered: Run, deltas: Sequence[wire.TokenDelta]) -> list[ContentBlock]:
    writer = MessageWriter(MESSAGE, ID)
    for event in (*deltas, ended(answered)):
        writer.add(event)
    return writer.ended(answered.result).content


def ended(answered: Run) -> wire.Job:
    return wire.Job(id=ID, kind="generate", model="m", status="finished", created_at=0.0, result=answered.result)


def assert_same_items(answered: Run, deltas: Sequence[wire.TokenDelta]) -> None:
    items = to_response(RESPONSE, answered.result, ID, 0).output
    assert streamed_items(answered, deltas) == streamed_items(answered, deltas, is_by_token=True) == items
    assert streamed_blocks(answered, deltas) == to_message(MESSAGE, answered.result, ID).content


@pytest.mark.parametrize(
    ("name", "text", "kinds"),
    [
        (
            "harmony",
            "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary<|message|>B<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>C<|end|><|start|>assistant" + FORMATS["harmony"].look,
            ["reasoning", "message", "reasoning", "function_call"],
        ),
        ("json_tools", FORMATS["json_tools"].look + "B" + EOS, ["function_call", "message"]),
        (
            "json_tools",
            f"<think>A</think>B{FORMATS['json_tools'].look}C",
            ["reasoning", "message", "function_call", "message"],
        ),
    ],
)
def test_items_and_blocks_have_the_order_of_the_tokens(name: str, text: str, kinds: list[str]):
    answered = run(name, text)

    output = to_response(RESPONSE, answered.result, ID, 0).output

    blocks = {"reasoning": "thinking", "message": "text", "function_call": "tool_use"}
    assert [item.__struct_config__.tag for item in output] == kinds
    content = to_message(MESSAGE, answered.result, ID).content
    assert [block.__struct_config__.tag for block in content] == [blocks[kind] for kind in kinds]
    for deltas in (answered.deltas, answered.deltas[:3], []):
        assert_same_items(answered, deltas)


def test_a_character_that_stays_unfinished_ends_the_answer():
    half = ids_of("json_tools", "🙂")[:2]
    token_ids = [*ids_of("json_tools", "<think>A"), *half, *ids_of("json_tools", "</think>B"), *half]
    answered = Run(chat_codec_of("json_tools"), token_ids)

    for deltas in (answered.deltas, answered.deltas[:3], []):
        assert_same_items(answered, deltas)
        assert_same(answered.whole, answered.chunks(deltas))


@st.composite
def answers(draw: st.DrawFn) -> dict[str, Any]:
    """Draw tokens of a format in any order: markers, parts of calls, whole calls, halves of characters, end tokens."""
    name = draw(st.sampled_from(sorted(FORMATS)))
    chat_format = FORMATS[name]
    texts = [
        chat_format.look,
        chat_format.count,
        chat_format.invalid,
        *chat_format.reasoning,
        *chat_format.content,
        "a",
        " \n",
        "ä🙂",
        "<",
        '"',
    ]
    parts = [ids_of(name, text) for text in texts]
    markers = [ids_of(name, text.removeprefix("+")) for text in (*chat_format.tokens, EOS)]
    halves = [ids_of(name, "🙂")[:2], ids_of(name, "ä")[1:]]
    part = st.sampled_from([part for part in parts if part])
    fragment = st.one_of(
        part,
        st.sampled_from([*markers, *halves]),
        st.builds(
            lambda ids, start, end: ids[start % len(ids) :][: end + 1], part, st.integers(0, 40), st.integers(0, 9)
        ),
    )
    token_ids = [token_id for ids in draw(st.lists(fragment, min_size=1, max_size=9)) for token_id in ids]
    if draw(st.booleans()):
        token_ids += ids_of(name, EOS)
    stops = st.lists(st.sampled_from(["a", "ook", '": ', "}<", ">\n", "l>", "ä", "call"]), max_size=2)
    steps = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    ends = {name: draw(st.booleans()) for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")}
    return {"name": name, "token_ids": token_ids, "steps": steps, "stop": draw(stops)} | ends


@settings(max_examples=400)
@given(answer=answers(), data=st.data())
def test_joined_chunks_equal_the_whole_answer(answer: dict[str, Any], data: st.DataObject):
    name = answer.pop("name")
    answered = Run(chat_codec_of(name), **answer)
    whole = answered.whole

    assert_same(whole, answered.chunks(answered.deltas))
    assert_same(whole, answered.chunks(answered.pieces(data.draw)))
    kept = [delta for delta in answered.deltas if data.draw(st.booleans())]
    assert_same(whole, answered.chunks([*kept, *answered.deltas[:2]]))
    assert_same_items(answered, kept)

    entries = whole.logprobs.content
    assert len(entries) == answered.result.usage.completion_tokens
    assert [entry.logprob for entry in entries] == [-float(number) for number in range(len(entries))]
    assert channel_text(whole, "content") == (whole.message.content or "")
    assert channel_text(whole, "reasoning") == (whole.message.reasoning_content or "")
    assert channel_text(whole, "markup") == ""
    special = [text for text in FORMATS[name].tokens if not text.startswith("+")]
    if answer["skip_special_tokens"]:
        assert not [
            text
            for text in [*special, EOS]
            if text in channel_text(whole, "content") + channel_text(whole, "reasoning")
        ]
    for call in whole.message.tool_calls or ():
        assert isinstance(json.loads(call.function.arguments), dict)
    if whole.finish_reason == "tool_calls":
        assert whole.message.tool_calls
