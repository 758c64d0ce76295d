"""The tokens that may follow at each point of a constrained answer, in each format that can be constrained."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from mlx_lm.tool_parsers.json_tools import parse_tool_call
from transformers import PreTrainedTokenizerFast

from scorepool.engine import ChatCodec, InvalidRequest, Tokenizer
from scorepool.engine.model.checkpoint import load_chat_codec
from scorepool.engine.text.chat.chat_format import ChatTags
from scorepool.engine.text.chat.grammar import Function, StructuredOutputSpec
from tests.chat_formats import (
    EOS,
    FORMATS,
    SAMPLES,
    TEXT_FORMATS,
    chat_codec_of,
    compile_constraint,
    generation_prompt_of,
    ids_of,
    save_tokenizer,
)
from tests.engine.text.chat.test_grammar_compiler import SCHEMA, ids_in


class Answer:
    """An answer to a chat in a format, whose tokens are given as text."""

    def __init__(self, name: str, spec: StructuredOutputSpec, generation_prompt: str | None = None) -> None:
        self._name = name
        self._chat = chat_codec_of(name)
        prompt_ids = generation_prompt_of(name) if generation_prompt is None else ids_of(name, generation_prompt)
        self._constraint = compile_constraint(self._chat, spec, prompt_ids)
        self._generated: list[int] = []

    def allowed_after(self, text: str) -> set[str]:
        """Append the text and return the tokens that may follow."""
        self._generated += ids_of(self._name, text)
        allowed = ids_in(self._constraint.token_bitmask(self._generated))
        assert self._constraint.error is None
        return {self._chat.tokenizer.token_bytes(token_id).decode("latin-1") for token_id in allowed}


A = StructuredOutputSpec(json_schema={"const": "a"})
FUNCTIONS = [Function(name=name, parameters={"properties": {"x": {"type": "integer"}}}) for name in ("look", "count")]
MAY_CALL = StructuredOutputSpec(functions=FUNCTIONS)
MUST_CALL = StructuredOutputSpec(functions=FUNCTIONS, must_call=True)
ONE_CALL = StructuredOutputSpec(functions=FUNCTIONS, must_call=True, parallel_calls=False)


def test_reasoning_is_free_until_its_end_tag_and_the_content_after_it_is_constrained():
    answer = Answer("opened", A)

    assert answer.allowed_after("Hm {") > {"}", "<think>"[0], "\xff", "</think>"}
    assert not answer.allowed_after("") & {EOS, "<tool_call>"}
    assert answer.allowed_after("</think>") == {'"'}
    assert answer.allowed_after('"a"') == {EOS}
    assert answer.allowed_after(EOS) == {EOS}


def test_an_answer_may_begin_with_reasoning_unless_the_prompt_has_ended_it():
    assert Answer("json_tools", A).allowed_after("") == {'"', "<think>"}
    assert Answer("json_tools", A, "<assistant><think></think>").allowed_after("") == {'"'}
    assert Answer("mistral", A).allowed_after("") == {'"', "[THINK]"}
    assert Answer("mistral_list", A).allowed_after("") == {'"'}
    assert Answer("harmony", A).allowed_after("<|channel|>") == {"a", "f"}  # analysis, final
    assert Answer("harmony", A).allowed_after("<|channel|>final<|message|>") == {'"'}


def test_the_constraint_of_a_plain_text_applies_from_its_first_token():
    chat = chat_codec_of("json_tools")

    assert ids_in(compile_constraint(chat, A, None).token_bitmask([])) == set(ids_of("json_tools", '"'))


@pytest.mark.parametrize("marker", ["<think>", "</think>", "<tool_call>", "</tool_call>"])
def test_constrained_text_contains_no_marker(marker: str):
    """Some markers are not special tokens of their tokenizer: inside a string they would end it for the parser."""
    anything = StructuredOutputSpec(json_schema={"type": "string"})
    call = StructuredOutputSpec(
        functions=[Function(name="look", parameters={"additionalProperties": {"type": "string"}})], must_call=True
    )

    assert marker not in Answer("json_tools", anything).allowed_after('"')
    assert marker not in Answer("json_tools", call).allowed_after('<tool_call>{"name": "look", "arguments": {"a": "')
    spelled = Answer("json_tools", StructuredOutputSpec(json_schema={"const": marker}))
    for place, letter in enumerate(f'"{marker}"'):
        assert letter in spelled.allowed_after("" if place == 0 else f'"{marker}"'[place - 1])


def test_an_optional_call_is_constrained_once_it_begins():
    answer = Answer("json_tools", MAY_CALL)

    assert answer.allowed_after("I look. ") > {"<tool_call>", "</tool_call>", "<think>", EOS, "{"}
    assert answer.allowed_after("<tool_call>") == {"\n", "{"}
    assert answer.allowed_after('{"name": "') == {"l", "c"}
    assert answer.allowed_after('count", "arguments": {"x":') == {" ", "-", *"0123456789"}
    assert answer.allowed_after("1}}</tool_call>") == {"<tool_call>", EOS}


def test_a_required_call_is_all_that_may_follow_the_reasoning():
    assert Answer("json_tools", MUST_CALL).allowed_after("") == {"<think>", "<tool_call>"}
    assert Answer("json_tools", MUST_CALL).allowed_after("<think>Hm.</think>") == {"<tool_call>"}
    assert Answer("opened", MUST_CALL).allowed_after("Hm.</think>") == {"<tool_call>"}


def test_an_answer_may_be_json_or_a_call():
    spec = StructuredOutputSpec(json_schema={"const": "a"}, functions=FUNCTIONS)

    assert Answer("json_tools", spec).allowed_after("") == {'"', "<think>", "<tool_call>"}
    assert Answer("json_tools", spec).allowed_after('"a"') == {EOS}
    assert Answer("harmony", spec).allowed_after("<|channel|>") == {"a", "f", "c"}


LOOK = {
    "json_tools": '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>',
    "mistral": '[TOOL_CALLS]look[ARGS]{"x": 1}',
    "mistral_list": '[TOOL_CALLS] [{"name": "look", "arguments": {"x": 1}}]',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    '{"x": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
    '{"x": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"x": 1}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n'
    '<｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="x" string="false">1'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    "apertus": '<|tools_prefix|>[{"look": {"x": 1}}]<|tools_suffix|>',
    "cohere_command3": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "look", "parameters": {"x": 1}}\n]'
    "<|END_ACTION|>",
    "ernie45": '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>',
    "gigachat3": '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "look", "arguments": {"x": 1}}',
    "granite-20b-fc": '<function_call> {"name": "look", "arguments": {"x": 1}}',
    "hunyuan_a13b": '<tool_calls>[{"name": "look", "arguments": {"x": 1}}]</tool_calls>',
    "hy_v3": "<tool_calls>\n<tool_call>look<tool_sep>\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
    "</tool_calls>",
    "inkling": '<|content_invoke_tool_json|>{"name": "look", "args": {"x": 1}}<|end_message|>',
    "internlm": '<|action_start|><|plugin|>\n{"name": "look", "parameters": {"x": 1}}<|action_end|>',
    "olmo3": "<function_calls>look(x=1)</function_calls>",
    "solar_open2": "<|tool_call:start|>look\n<|tool_arg:start|>x<|tool_arg:value|>1<|tool_arg:end|>\n<|tool_call:end|>",
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="look">'
    '<steptml:parameter name="x">1</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
    "minicpm5": '<function name="look"><param name="x">1</param></function>',
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="look">]<]minimax[>[<x>1]<]minimax[>[</x>'
    "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "xlam": '[{"name": "look", "arguments": {"x": 1}}]',
    "functionary_v32": 'look\n{"x": 1}',
    "granite": '<|tool_call|>[{"name": "look", "arguments": {"x": 1}}]',
    "llama3_json": '{"name": "look", "parameters": {"x": 1}}',
    "nemotron_json": '<TOOLCALL>[{"name": "look", "arguments": {"x": 1}}]</TOOLCALL>',
    "jamba": '<tool_calls>[{"name": "look", "arguments": {"x": 1}}]</tool_calls>',
    "harmony": '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"x": 1}<|call|>',
    "phi4_mini_json": 'functools[{"name": "look", "arguments": {"x": 1}}]',
    "functionary": '<function=look>{"x": 1}</function>',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=look>\n<parameter=x>1</parameter>\n</function>\n</seed:tool_call>",
    "glm47": "<tool_call>look\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "longcat": "<longcat_tool_call>look<longcat_arg_key>x</longcat_arg_key><longcat_arg_value>1</longcat_arg_value>"
    "</longcat_tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="look">\n<parameter name="x">1</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "gemma4": "<|tool_call>call:look{x:1}<tool_call|>",
    "function_gemma": "<start_function_call>call:look{x:1}<end_function_call>",
    "lfm2": "<|tool_call_start|>[look(x=1)]<|tool_call_end|>",
    "llama4_pythonic": "[look(x=1)]",
    "pythonic": "[look(x=1)]",
}


@pytest.mark.parametrize("name", LOOK)
def test_without_parallel_calls_one_call_ends_the_answer(name: str):
    assert Answer(name, ONE_CALL).allowed_after(LOOK[name]) == {EOS}


@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_a_call_that_begins_with_a_text_may_follow_content_and_is_constrained(name: str):
    sample = TEXT_FORMATS[name]
    answer = Answer(name, MAY_CALL)
    before = sample.content[0].removeprefix(sample.opened)

    assert answer.allowed_after(f"{before}1 < 2, so I look. ") > {"a", "{", EOS}
    assert "z" not in answer.allowed_after(
        sample.opened + LOOK[name].partition("look")[0]
    )  # a name that was not offered
    assert EOS in answer.allowed_after(f"look{LOOK[name].partition('look')[2]}")


@pytest.mark.parametrize("name", ["json_tools", "mistral"])
def test_parallel_calls_may_be_several(name: str):
    assert EOS in Answer(name, MUST_CALL).allowed_after(LOOK[name] * 3)


def test_an_answer_that_may_be_a_call_is_any_other_text_or_a_call():
    assert Answer("llama3_json", MAY_CALL).allowed_after("") > {"a", " ", "[", EOS, "{"}
    assert Answer("llama3_json", MAY_CALL).allowed_after("{") == {'"'}
    assert Answer("llama3_json", MAY_CALL).allowed_after("A {") > {"a", "{", EOS}
    answer = Answer("llama3_json", MUST_CALL)
    assert answer.allowed_after("") == {"{"}
    assert answer.allowed_after(LOOK["llama3_json"]) == {";", EOS}
    assert Answer("nemotron_json", MAY_CALL).allowed_after("") > {"<think>", "a", "<"}
    assert Answer("nemotron_json", MAY_CALL).allowed_after("<think>Hm.</think><") == {"T"}


@pytest.mark.parametrize("name", sorted({*SAMPLES} - {*LOOK, "opened"}))
def test_calls_whose_format_has_no_grammar_are_refused(name: str):
    assert chat_codec_of(name).grammar_compiler.unsupported_reason(has_functions=True)
    with pytest.raises(InvalidRequest):
        Answer(name, MUST_CALL)


def test_no_header_stands_before_json_where_the_tokenizer_lacks_the_token_between_them(tmp_path: Path):
    sample = SAMPLES["inkling"]
    tokens = tuple(token for token in sample.tokens if token != "<|content_text|>")
    save_tokenizer(replace(sample, tokens=tokens), sample.template_hint, tmp_path)
    chat = load_chat_codec(tmp_path, {})

    constraint = compile_constraint(chat, A, [])

    header, quote = (chat.tokenizer.encode(text, add_bos=False)[0][0] for text in ("<|message_model|>", '"'))
    assert quote in ids_in(constraint.token_bitmask([]))
    assert quote not in ids_in(constraint.token_bitmask([header]))  # it would be part of the header
    assert constraint.error is None


def test_json_is_refused_only_for_unknown_headers():
    compilers = {name: chat_codec_of(name).grammar_compiler for name in FORMATS}

    refused = [name for name, compiler in compilers.items() if compiler.unsupported_reason(has_functions=False)]

    assert refused == ["muse_spark"]
    with pytest.raises(InvalidRequest, match="headers"):
        Answer("muse_spark", A)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"properties": {"a": {"type": "foo"}}}, "Invalid type: foo"),
        ({"properties": {"a": {"type": "string", "format": "nope"}}}, "Unknown format: nope"),
        ({"type": "string"}, "expected a schema of objects"),
    ],
)
def test_unsupported_parameters_are_refused_with_the_name_of_their_function(parameters: dict[str, Any], reason: str):
    functions = [*FUNCTIONS, Function(name="fly", parameters=parameters, strict=True), *FUNCTIONS]

    with pytest.raises(InvalidRequest, match=f"^the parameters of 'fly': .*{reason}$"):
        Answer("json_tools", StructuredOutputSpec(functions=functions))


def test_a_function_name_that_a_format_cannot_write_is_refused():
    with pytest.raises(InvalidRequest, match=r"'look\.up'"):
        Answer("mistral", StructuredOutputSpec(functions=[Function(name="look.up", parameters={})]))


def demo_chat_codec(root: Path) -> ChatCodec:
    """Return the demo model's codec, with call markers that are not special tokens and do not look like any."""
    fast = PreTrainedTokenizerFast.from_pretrained(root / "scorepool" / "models" / "demo")
    fast.add_tokens(["[CALL]", "[/CALL]"])
    tags = ChatTags(call=("[CALL]", "[/CALL]"), tool_parser=parse_tool_call, call_format="hermes")
    return ChatCodec(Tokenizer(fast, [2]), tags)


def test_constrained_text_contains_no_marker_that_is_an_ordinary_token(root: Path):
    chat = demo_chat_codec(root)
    generated, _ = chat.tokenizer.encode('"a')

    constraint = compile_constraint(chat, StructuredOutputSpec(json_schema={"type": "string"}), [])

    allowed = ids_in(constraint.token_bitmask(generated))
    assert len(allowed) > 1000
    assert not allowed & chat.chat_format.marker_ids


@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_many_characters_spell_calls_too(root: Path, seed: int):
    """Some tokens span the end of one part of the grammar and the beginning of the next."""
    chat = demo_chat_codec(root)
    spec = StructuredOutputSpec(functions=[Function(name="look", parameters=SCHEMA)], must_call=True)
    constraint, parser = compile_constraint(chat, spec, []), chat.output_parser([])
    rng, generated = random.Random(seed), list[int]()

    while generated[-1:] != [2]:
        generated.append(rng.choice(sorted(ids_in(constraint.token_bitmask(generated)))))
        parser.read(generated[-1])

    tool = {"type": "function", "function": {"name": "look"}}
    calls = [call for span in parser.spans for call in chat.parse_tool_calls(span, generated, [tool])]
    assert calls
    assert len(parser.spans) == len(calls)
    assert "content" not in parser.channels
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
