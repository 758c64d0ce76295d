"""Calls are read back as they were written, in every format, and the survey of calls tells right from wrong."""

import json
from dataclasses import replace
from typing import Any

import pytest
from mlx_lm.tool_parsers import qwen3_coder

from scorepool.engine import ChatCodec
from survey.calls import document, hostile, read_back
from survey.calls.generated import SPLIT, turns
from survey.calls.writers import WRITERS
from tests.answered_chat import Run
from tests.engine.text.chat.test_published_templates import CALL, GO, RENDERED_TOOLS, published

PUBLISHED = {  # templates that write calls as a format does
    "gemma4": ["gemma4_v3"],
    "glm45": ["glm4moe"],
    "hermes": ["qwen2_5", "qwen3", "qwen3_instruct_2507"],
    "llama3_json": ["llama3_1"],
    "openai": ["gptoss"],
    "qwen3_coder": ["qwen3_5_think", "nemotron_3_nano"],
}


@pytest.mark.parametrize("name", WRITERS)
def test_calls_are_read_back_as_they_were_written(name: str):
    found = read_back.read_back(name, num=10, seed=1)

    assert found.wrong == 0, found.examples
    assert found.turns == 10
    assert found.calls >= 10


@pytest.mark.parametrize("name", WRITERS)
def test_an_answer_that_is_no_call_of_any_format_is_streamed_as_it_is_told_whole(name: str):
    assert hostile.check(name, 6, 1, pytest.fail) == 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("name", WRITERS)
def test_many_calls_are_read_back_as_they_were_written(name: str, seed: int):
    found = read_back.read_back(name, num=200, seed=seed)

    assert found.wrong == 0, found.examples


@pytest.mark.parametrize(("name", "template"), [(name, each) for name in PUBLISHED for each in PUBLISHED[name]])
def test_calls_are_written_as_published_templates_write_them(name: str, template: str):
    function = CALL["function"]
    chat = published(template)
    ids, _ = chat.encode([*GO, {"role": "assistant", "content": "", "tool_calls": [CALL]}], RENDERED_TOOLS)
    written = WRITERS[name].calls([(function["name"], function["arguments"])])

    rendered = chat.tokenizer.decode(ids).replace("\\u00fc", "ü")  # Llama's template writes JSON in ASCII
    assert written.removesuffix("<|start|>assistant") in rendered


def test_texts_that_look_like_markers_are_written_in_other_tokens():
    texts = json.dumps([[turn.calls, turn.content] for turn in turns(0, 100)], ensure_ascii=False)

    assert texts.count(f"<{SPLIT}tool_call>") > 0
    assert "<tool_call>" not in texts


def test_the_table_is_that_of_the_findings_of_200_turns_of_each_format():
    kept = json.loads(document.RESULTS.read_text())["formats"]

    assert sorted(kept) == sorted(WRITERS)
    assert {each["turns"] for each in kept.values()} == {200}
    assert document.render(document.DOCUMENT.read_text()) == document.DOCUMENT.read_text()


def spoil(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let the format of all codecs of the survey have these fields."""
    make = read_back._codec

    def spoiled(*given: Any) -> ChatCodec:
        codec = make(*given)
        codec.chat_format = replace(codec.chat_format, **changes)
        return codec

    monkeypatch.setattr(read_back, "_codec", spoiled)


def test_a_parser_that_misreads_strings_is_found(monkeypatch: pytest.MonkeyPatch):
    spoil(monkeypatch, tool_parser=qwen3_coder.parse_tool_call)

    assert read_back.read_back("qwen3_coder", num=30, seed=1).misread > 0


def test_a_marker_that_is_not_known_is_found_as_leaked(monkeypatch: pytest.MonkeyPatch):
    spoil(monkeypatch, transitions={}, special_token_ids=frozenset())

    found = read_back.read_back("hermes", num=10, seed=1)

    assert found.misread == 10
    assert found.leaked == 10
    assert found.examples


def test_a_lost_chunk_is_found(monkeypatch: pytest.MonkeyPatch):
    chunks = Run.chunks
    monkeypatch.setattr(Run, "chunks", lambda run, deltas: chunks(run, deltas)[1:])

    found = read_back.read_back("hermes", num=10, seed=1)

    assert found.streamed_differently > 0
    assert found.misread == 0
