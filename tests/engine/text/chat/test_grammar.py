"""What may follow what in an answer that is wanted to be of a kind, in each format that can be constrained."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from mlx_lm.tool_parsers.json_tools import parse_tool_call
from transformers import PreTrainedTokenizerFast

from scorepool.engine import InvalidRequest, Tokenizer
from scorepool.engine.text.chat.chat_format import Tags
from scorepool.engine.text.chat.constraint import Constrainer
from scorepool.engine.text.chat.grammar import Function, StructuredOutputSpec
from tests.chat_formats import EOS, FORMATS, ids_of, opening_of, tokenizer_of
from tests.engine.text.chat.test_constraint import SCHEMA, bits


class Row:
    """Of a chat's answer in a format, whose tokens are given as text."""

    def __init__(self, name: str, wanted: StructuredOutputSpec, opening: str | None = None) -> None:
        self._name = name
        self._tokenizer = tokenizer_of(name)
        opened = opening_of(name) if opening is None else ids_of(name, opening)
        self._constraint = self._tokenizer.constraint(wanted, opened)
        self._said: list[int] = []

    def after(self, said: str) -> set[str]:
        """What may follow this, which follows what was said before."""
        self._said += ids_of(self._name, said)
        may = bits(self._constraint.token_bitmask(self._said))
        assert self._constraint.error is None
        return {self._tokenizer.token_bytes(token_id).decode("latin-1") for token_id in may}


A = StructuredOutputSpec(json_schema={"const": "a"})
FUNCTIONS = [Function(name=name, parameters={"properties": {"x": {"type": "integer"}}}) for name in ("look", "count")]
MAY_CALL = StructuredOutputSpec(functions=FUNCTIONS)
MUST_CALL = StructuredOutputSpec(functions=FUNCTIONS, must_call=True)
ONE_CALL = StructuredOutputSpec(functions=FUNCTIONS, must_call=True, may_call_several=False)


def test_reasoning_is_free_but_for_an_end_and_what_follows_it_is_not():
    row = Row("opened", A)

    assert row.after("Hm {") > {"}", "<think>"[0], "\xff", "</think>"}
    assert not row.after("") & {EOS, "<tool_call>"}
    assert row.after("</think>") == {'"'}
    assert row.after('"a"') == {EOS}
    assert row.after(EOS) == {EOS}


def test_a_model_that_may_reason_may_begin_with_it_unless_the_prompt_has_ended_it():
    assert Row("json_tools", A).after("") == {'"', "<think>"}
    assert Row("json_tools", A, "<assistant><think></think>").after("") == {'"'}
    assert Row("mistral", A).after("") == {'"'}
    assert Row("harmony", A).after("<|channel|>") == {"a", "f"}  # analysis, final
    assert Row("harmony", A).after("<|channel|>final<|message|>") == {'"'}


def test_what_is_wanted_of_a_text_that_is_no_chat_begins_at_once():
    tokenizer = tokenizer_of("json_tools")

    assert bits(tokenizer.constraint(A, None).token_bitmask([])) == set(ids_of("json_tools", '"'))


@pytest.mark.parametrize("mark", ["<think>", "</think>", "<tool_call>", "</tool_call>"])
def test_no_marker_is_text_of_what_is_constrained(mark: str):
    """Some are no special tokens of their tokenizer: within a string they would end it for the reader."""
    anything = StructuredOutputSpec(json_schema={"type": "string"})
    call = StructuredOutputSpec(
        functions=[Function(name="look", parameters={"additionalProperties": {"type": "string"}})], must_call=True
    )

    assert mark not in Row("json_tools", anything).after('"')
    assert mark not in Row("json_tools", call).after('<tool_call>{"name": "look", "arguments": {"a": "')
    spelled = Row("json_tools", StructuredOutputSpec(json_schema={"const": mark}))
    for place, letter in enumerate(f'"{mark}"'):
        assert letter in spelled.after("" if place == 0 else f'"{mark}"'[place - 1])


def test_a_call_is_free_to_begin_and_then_is_not():
    row = Row("json_tools", MAY_CALL)

    assert row.after("I look. ") > {"<tool_call>", "</tool_call>", "<think>", EOS, "{"}
    assert row.after("<tool_call>") == {"\n", "{"}
    assert row.after('{"name": "') == {"l", "c"}
    assert row.after('count", "arguments": {"x":') == {" ", "-", *"0123456789"}
    assert row.after("1}}</tool_call>") == {"<tool_call>", EOS}


def test_a_call_that_must_be_is_all_there_is():
    assert Row("json_tools", MUST_CALL).after("") == {"<think>", "<tool_call>"}
    assert Row("json_tools", MUST_CALL).after("<think>Hm.</think>") == {"<tool_call>"}
    assert Row("opened", MUST_CALL).after("Hm.</think>") == {"<tool_call>"}


def test_either_is_json_or_a_call():
    either = StructuredOutputSpec(json_schema={"const": "a"}, functions=FUNCTIONS)

    assert Row("json_tools", either).after("") == {'"', "<think>", "<tool_call>"}
    assert Row("json_tools", either).after('"a"') == {EOS}
    assert Row("harmony", either).after("<|channel|>") == {"a", "f", "c"}


LOOK = {
    "json_tools": '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>',
    "mistral": '[TOOL_CALLS]look[ARGS]{"x": 1}',
    "mistral_list": '[TOOL_CALLS] [{"name": "look", "arguments": {"x": 1}}]',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    '{"x": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "harmony": '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"x": 1}<|call|>',
}


@pytest.mark.parametrize("name", LOOK)
def test_one_call_is_one(name: str):
    assert Row(name, ONE_CALL).after(LOOK[name]) == {EOS}


@pytest.mark.parametrize("name", ["json_tools", "mistral"])
def test_several_calls_are_some(name: str):
    assert EOS in Row(name, MUST_CALL).after(LOOK[name] * 3)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {*LOOK, "opened"}))
def test_a_format_that_writes_arguments_in_no_json_says_so(name: str):
    tokenizer = tokenizer_of(name)

    assert tokenizer.why_not_constrained(calls=True)
    with pytest.raises(InvalidRequest):
        Row(name, MUST_CALL)


def test_only_the_prompts_of_headers_that_are_not_known_are_refused_json():
    refused = [name for name in FORMATS if tokenizer_of(name).why_not_constrained(calls=False)]

    assert refused == ["muse_spark"]
    with pytest.raises(InvalidRequest, match="headers"):
        Row("muse_spark", A)


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"properties": {"a": {"type": "foo"}}}, "Invalid type: foo"),
        ({"properties": {"a": {"type": "string", "format": "nope"}}}, "Unknown format: nope"),
        ({"type": "string"}, "expected a schema of objects"),
    ],
)
def test_parameters_that_cannot_be_followed_are_refused_by_their_functions_name(parameters: dict[str, Any], why: str):
    functions = [*FUNCTIONS, Function(name="fly", parameters=parameters, strict=True), *FUNCTIONS]

    with pytest.raises(InvalidRequest, match=f"^the parameters of 'fly': .*{why}$"):
        Row("json_tools", StructuredOutputSpec(functions=functions))


def test_a_name_that_a_format_cannot_say_is_refused():
    with pytest.raises(InvalidRequest, match=r"'look\.up'"):
        Row("mistral", StructuredOutputSpec(functions=[Function(name="look.up", parameters={})]))


def demo_that_calls(root: Path) -> Tokenizer:
    """The demo model's tokenizer, with markers that are no special tokens and do not look like any."""
    fast = PreTrainedTokenizerFast.from_pretrained(root / "scorepool" / "models" / "demo")
    fast.add_tokens(["[CALL]", "[/CALL]"])
    tags = Tags(call=("[CALL]", "[/CALL]"), parser=parse_tool_call, call_format="json_tools")
    return Tokenizer(fast, [2], tags, Constrainer)


def test_a_marker_that_is_an_ordinary_token_is_no_text(root: Path):
    tokenizer = demo_that_calls(root)
    begun, _ = tokenizer.encode('"a')

    may = bits(tokenizer.constraint(StructuredOutputSpec(json_schema={"type": "string"}), []).token_bitmask(begun))

    assert len(may) > 1000
    assert not may & tokenizer.markup.marker_ids


@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_many_characters_write_calls_too(root: Path, seed: int):
    """Some hold the end of one part of the grammar and the beginning of the next."""
    tokenizer = demo_that_calls(root)
    constraint = tokenizer.constraint(
        StructuredOutputSpec(functions=[Function(name="look", parameters=SCHEMA)], must_call=True), []
    )
    any_of, generated, reader = random.Random(seed), list[int](), tokenizer.reader([])

    while generated[-1:] != [2]:
        generated.append(any_of.choice(sorted(bits(constraint.token_bitmask(generated)))))
        reader.read(generated[-1])

    tool = {"type": "function", "function": {"name": "look"}}
    calls = [call for span in reader.spans for call in tokenizer.calls(span, generated, [tool])]
    assert calls
    assert len(reader.spans) == len(calls)
    assert "content" not in reader.channels
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
