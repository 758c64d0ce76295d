"""The format of a model's calls and reasoning can be chosen by name, where its template does not tell it."""

from dataclasses import replace
from pathlib import Path

import pytest

from scorepool.engine import REASONING_PARSERS, TOOL_PARSERS, ChatCodec, LoadError
from scorepool.engine.model.checkpoint import load_chat_codec
from tests.chat_formats import EOS, LOOK, OPENED_FORMATS, SAMPLES, TOOLS, names_and_arguments, save_tokenizer

SAMPLE_OF = {  # the sample of the format of a name, if they differ
    "cohere_command4": "cohere_command3",
    "functiongemma": "function_gemma",
    "glm45": "glm47",
    "gpt_oss": "harmony",
    "granite4": "json_tools",
    "hermes": "json_tools",
    "llama4_json": "llama3_json",
    "mimo": "qwen3_coder",
    "openai": "harmony",
    "poolside_v1": "glm47",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
}
# Those without tokens of their own.
TEXTS = {*OPENED_FORMATS, "functionary_v32", "granite-20b-fc", "hunyuan_a13b", "minicpm5", "olmo3"}
NAMES = [name for name in TOOL_PARSERS if name not in ("auto", "none")]


def codec_of(sample: str, folder: Path, **parsers: str) -> ChatCodec:
    """Load the tokenizer of a format under a template that does not tell it."""
    save_tokenizer(SAMPLES[sample], "", folder)
    return load_chat_codec(folder, {}, **parsers)


def calls_in(codec: ChatCodec, text: str) -> list[tuple[str, object]]:
    ids, _ = codec.tokenizer.encode(text, add_bos=False)
    parser = codec.output_parser([])
    for token_id in ids:
        parser.read(token_id)
    parser.end()
    return [call for span in parser.spans for call in names_and_arguments(codec.parse_tool_calls(span, ids, TOOLS))]


@pytest.mark.parametrize("name", NAMES)
def test_a_named_format_is_read(name: str, tmp_path: Path):
    sample = SAMPLE_OF.get(name, name)
    assert calls_in(codec_of(sample, tmp_path, tool_parser=name), SAMPLES[sample].look + EOS) == [LOOK]


def test_none_reads_no_calls_and_no_reasoning(tmp_path: Path):
    codec = codec_of("json_tools", tmp_path, tool_parser="none", reasoning_parser="none")
    assert calls_in(codec, SAMPLES["json_tools"].look + EOS) == []
    assert codec.chat_format.transitions["content"] == {}
    assert codec.tools_unsupported_reason() == "the format in which this model calls functions is not known"


@pytest.mark.parametrize("name", [name for name in NAMES if SAMPLE_OF.get(name, name) not in TEXTS])
def test_a_format_whose_markers_are_no_tokens_is_refused(name: str, tmp_path: Path):
    with pytest.raises(LoadError, match=rf"tool_parser {name} does not fit this model: the tokenizer has no token '"):
        codec_of("phi4_mini_json", tmp_path, tool_parser=name)


@pytest.mark.parametrize("name", [name for name in REASONING_PARSERS if name not in ("auto", "none")])
def test_reasoning_tags_that_are_no_tokens_are_refused(name: str, tmp_path: Path):
    with pytest.raises(
        LoadError, match=rf"reasoning_parser {name} does not fit this model: the tokenizer has no token"
    ):
        codec_of("phi4_mini_json", tmp_path, reasoning_parser=name)


def test_reasoning_is_chosen_by_name(tmp_path: Path):
    codec = codec_of("mistral", tmp_path, reasoning_parser="mistral")
    ids, _ = codec.tokenizer.encode("[THINK]Hm.[/THINK]Yes.", add_bos=False)
    parser = codec.output_parser([])
    for token_id in ids:
        parser.read(token_id)
    assert parser.channels == ["markup", *["reasoning"] * 3, "markup", *["content"] * 4]


@pytest.mark.parametrize(
    "parsers", [{"tool_parser": "hermes"}, {"tool_parser": "llama3_json"}, {"tool_parser": "none"}]
)
def test_a_model_that_writes_headers_has_no_other_format(parsers: dict[str, str], tmp_path: Path):
    with pytest.raises(LoadError, match="does not fit this model: its answers are messages with headers"):
        codec_of("harmony", tmp_path, **parsers)


@pytest.mark.parametrize("field", ["tool_parser", "reasoning_parser"])
def test_an_unknown_name_is_refused_with_those_that_are_known(field: str, tmp_path: Path):
    with pytest.raises(LoadError, match=rf"{field} is 'x', expected one of auto, none, [a-z]"):
        codec_of("json_tools", tmp_path, **{field: "x"})


def test_phi_may_write_its_calls_between_tokens(tmp_path: Path):
    sample = replace(SAMPLES["phi4_mini_json"], tokens=("<|tool_call|>", "<|/tool_call|>"))
    save_tokenizer(sample, "", tmp_path)
    codec = load_chat_codec(tmp_path, {}, tool_parser="phi4_mini_json")
    call = sample.look.removeprefix("functools")
    assert calls_in(codec, f"<|tool_call|>{call}<|/tool_call|>{EOS}") == [LOOK]


def test_every_name_is_in_the_documents(root: Path):
    text = (root / "docs" / "openai.md").read_text()
    assert [name for name in (*NAMES, *REASONING_PARSERS[2:]) if f"`{name}`" not in text] == []
