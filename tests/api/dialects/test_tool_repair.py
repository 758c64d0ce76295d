"""Calls that a degraded model writes as text are calls where a setting asks for it: once, and no examples."""

import json
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from openai import OpenAI

from scorepool.engine import ChatCodec
from scorepool.engine.model.checkpoint import load_chat_codec
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from tests import scripted_model
from tests.answered_chat import Run
from tests.api.dialects.test_channels import assert_same
from tests.chat_formats import COUNT, EOS, FORMATS, LOOK, OPENED_FORMATS, TOOLS, save_tokenizer

CALL = '{"name": "look", "arguments": {"place": "Zürich"}}'
WRITTEN = {  # ways to write LOOK
    "calling": '[Calling tool: look({"place": "Zürich"})]',
    "tool_call": f"[TOOL_CALL]{CALL}[/TOOL_CALL]",
    "lines": f"[TOOL_CALL]\n{CALL}\n[/TOOL_CALL]",
    "arrows": '[TOOL_CALL]\n{tool => "look", args => {\n  --place "Zürich"\n}}\n[/TOOL_CALL]',
    "fence": f"```json\n{CALL}\n```",
    "plain fence": f"```\n[{CALL}]\n```",
    "other names": '```json\n{"tool": "look", "parameters": {"place": "Zürich"}}\n```',
}
ANYWHERE = ["calling", "tool_call", "lines", "arrows"]  # the others only at the end of an answer
MANY = ["json_tools", "qwen3_coder", "gemma4", "mistral", "granite", "harmony", "lfm2"]


@cache
def codec_of(name: str, repairs: bool = True, learns: bool = False) -> ChatCodec:
    sample = (FORMATS | OPENED_FORMATS)[name]
    with TemporaryDirectory() as folder:
        training = [f"I look. \n\n{text}\n\n {text}{text}" for text in WRITTEN.values()] if learns else []
        save_tokenizer(sample, sample.template_hint, Path(folder), training)
        return load_chat_codec(Path(folder), {}, tool_repair=repairs)


class Repaired:
    """An answer, read whole and in streams of several chunk sizes, which must be the same."""

    def __init__(self, text: str, name: str = "json_tools", ends: bool = True, **options: Any) -> None:
        for learns in (False, True):
            codec = codec_of(name, learns=learns)
            sample = (FORMATS | OPENED_FORMATS)[name]
            answer = sample.content[0] + text + (EOS if ends else "")
            token_ids = codec.tokenizer.encode(answer, add_bos=False)[0]
            rng = random.Random(len(text))
            for steps in ([1], [rng.randint(1, 9) for _ in range(7)], [10_000]):
                answered = Run(codec, token_ids, steps=steps, **options)
                assert_same(answered.whole, answered.chunks(answered.deltas))
                entries = answered.whole.logprobs.content
                assert [entry.logprob for entry in entries] == [-float(number) for number in range(len(token_ids))]
        message = answered.whole.message
        self.finish_reason = answered.whole.finish_reason
        self.content = message.content
        self.calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("written", WRITTEN)
def test_a_call_that_is_written_as_text_is_a_call(name: str, written: str):
    answer = Repaired(f"I look.\n{WRITTEN[written]}", name)

    assert answer.calls == [LOOK]
    assert answer.content == "I look.\n"


def test_a_call_alone_has_no_content_and_ends_the_answer_as_calls_do():
    answer = Repaired(WRITTEN["calling"])

    assert (answer.calls, answer.content, answer.finish_reason) == ([LOOK], None, "tool_calls")


@pytest.mark.parametrize("written", WRITTEN)
def test_without_the_setting_it_is_text(written: str):
    codec = codec_of("json_tools", repairs=False)
    answered = Run(codec, codec.tokenizer.encode(WRITTEN[written] + EOS, add_bos=False)[0])

    assert answered.whole.message.content == WRITTEN[written]
    assert not answered.whole.message.tool_calls


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("options", [{"tools": None}, {"tool_choice": "none"}])
def test_in_an_answer_that_may_not_call_it_is_an_example(written: str, options: dict[str, Any]):
    answer = Repaired(f"Write this:\n{WRITTEN[written]}", **options)

    assert answer.calls == []
    assert answer.content == f"Write this:\n{WRITTEN[written]}"


@pytest.mark.parametrize("written", WRITTEN)
def test_a_call_in_the_middle_of_a_line_is_text(written: str):
    text = f"I write {WRITTEN[written]}"
    assert Repaired(text).content == text


@pytest.mark.parametrize("written", WRITTEN)
def test_a_function_that_was_not_offered_is_not_called(written: str):
    text = WRITTEN[written].replace("look", "fly")
    answer = Repaired(text)
    assert (answer.calls, answer.content) == ([], text)


@pytest.mark.parametrize("written", ["fence", "plain fence", "other names"])
def test_a_fenced_block_that_text_follows_is_an_example(written: str):
    text = f"For example:\n{WRITTEN[written]}\nand so on"
    answer = Repaired(text)
    assert (answer.calls, answer.content) == ([], text)


def test_a_fenced_block_of_an_answer_that_was_cut_off_is_content():
    answer = Repaired(WRITTEN["fence"], ends=False)
    assert (answer.calls, answer.content) == ([], WRITTEN["fence"])


@pytest.mark.parametrize("written", ANYWHERE)
def test_text_may_follow_a_call(written: str):
    answer = Repaired(f"{WRITTEN[written]}\nThat is it.")
    assert answer.calls == [LOOK]
    assert (answer.content or "").strip() == "That is it."


@pytest.mark.parametrize("written", WRITTEN)
def test_the_same_call_is_made_once(written: str):
    text, own = WRITTEN[written], FORMATS["json_tools"].look
    assert Repaired(f"{text}\n\n{text}").calls == [LOOK]
    assert Repaired(f"{own}\n{text}").calls == [LOOK]
    other = '[Calling tool: count_up({"x": 1})]'
    if written in ANYWHERE:
        assert Repaired(f"{text}\n{own}").calls == [LOOK]
        assert Repaired(f"{text}\n{other}\n{own}\n{text}").calls == [LOOK, COUNT]
    else:
        assert Repaired(f"{text}\n{own}").calls == [LOOK]  # the text is an example, and content
        assert Repaired(f"{text}\n{other}\n{text}").calls == [LOOK, COUNT]


def test_the_models_own_format_may_call_twice():
    own = FORMATS["json_tools"].look
    assert Repaired(own + own).calls == [LOOK, LOOK]


@pytest.mark.parametrize(
    "text",
    [
        "[Calling tool: I will look]",
        "[Calling tool: look({)]",
        '[Calling tool: look(place="Zürich")]',
        "[TOOL_CALL]what?[/TOOL_CALL]",
        "[TOOL_CALL]",
        "```json\n[1, 2]\n```",
        f"```json\n{CALL[:-1]}\n```",
        '```json\n{"name": "look", "arguments": {}, "comment": 1}\n```',
        "```python\nlook()\n```",
        "```",
        "`look`",
        "[",
        "<",
        f"```json\n{CALL}\n``` as above",
        f"```markdown\n{WRITTEN['fence']}\n```",
    ],
)
def test_what_only_begins_as_a_call_is_content(text: str):
    for whole in (text, f"{text}\n", f"A\n{text}\nB"):
        answer = Repaired(whole)
        assert (answer.calls, answer.content) == ([], whole)


def test_closing_texts_in_strings_do_not_end_a_call():
    place = "a)] [/TOOL_CALL] </tool_call> ``` \n```"
    arguments = json.dumps({"place": place})
    for text in (
        f"[Calling tool: look({arguments})]",
        f'[TOOL_CALL]{{"name": "look", "arguments": {arguments}}}[/TOOL_CALL]',
        f'```json\n{{"name": "look", "arguments": {arguments}}}\n```',
    ):
        assert Repaired(text, "mistral").calls == [("look", {"place": place})]


def test_markers_of_reasoning_in_a_call_end_it():
    answer = Repaired('[Calling tool: look({"place": "<think>Hm</think>"})]')
    assert answer.calls == []
    assert answer.content == '[Calling tool: look({"place": ""})]'


def test_a_model_without_a_known_format_may_call_in_text():
    with TemporaryDirectory() as folder:
        save_tokenizer(FORMATS["json_tools"], "", Path(folder))
        codec = load_chat_codec(Path(folder), {}, tool_parser="none", tool_repair=True)
    answered = Run(codec, codec.tokenizer.encode(WRITTEN["calling"] + EOS, add_bos=False)[0])
    (call,) = answered.whole.message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == LOOK


@pytest.mark.parametrize(("name", "splits"), [("mistral", False), ("json_tools", True)])
def test_a_call_in_tags_of_letters_is_a_call(name: str, splits: bool):
    """The tokenizer has no such token, or the model spells it in others."""
    codec = codec_of(name)
    pieces = ["I look.\n", "<", f"tool_call>\n{CALL}\n<", "/tool_call>", EOS] if splits else []
    texts = pieces or [f"I look.\n<tool_call>\n{CALL}\n</tool_call>{EOS}"]
    token_ids = [token_id for text in texts for token_id in codec.tokenizer.encode(text, add_bos=False)[0]]

    message = Run(codec, token_ids).whole.message

    assert message.content == "I look.\n"
    assert [json.loads(call.function.arguments) for call in message.tool_calls or ()] == [LOOK[1]]


SCRIPT = ["<think>", "Where?", "</think>", "I look.", "Ċ", "[Calling tool: look(", '{"place": ', '"Zürich"}', ")]"]


def test_the_setting_reaches_a_worker(tmp_path: Path):
    """The answers of released clients, whole and streamed."""
    scripted_model.build(tmp_path / "model", [*SCRIPT, scripted_model.EOS])
    environ = {"SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_TOOL_REPAIR": "1"}
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Go."}], "temperature": 0}
    with (
        Stack([f"m={tmp_path / 'model'}"], state=tmp_path, environ=environ, logs=tmp_path) as stack,
        OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as sdk,
    ):
        message = sdk.chat.completions.create(**asked, tools=TOOLS).choices[0].message
        streamed = [chunk.choices[0] for chunk in sdk.chat.completions.create(**asked, tools=TOOLS, stream=True)]
        without_tools = sdk.chat.completions.create(**asked).choices[0].message

    (call,) = message.tool_calls or ()
    assert (message.content, call.function.name) == ("I look.\n", "look")
    assert json.loads(call.function.arguments) == LOOK[1]
    assert "".join(choice.delta.content or "" for choice in streamed) == "I look.\n"
    (chunk,) = [each for choice in streamed for each in choice.delta.tool_calls or ()]
    assert (chunk.id, chunk.function.arguments) == (call.id, call.function.arguments)
    assert streamed[-1].finish_reason == "tool_calls"
    assert not without_tools.tool_calls
    assert without_tools.content == f"I look.\n{''.join(SCRIPT[5:])}"
