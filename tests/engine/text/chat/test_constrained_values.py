"""Arguments of calls that are not JSON follow their schema: random walks through the grammar are valid calls."""

import json
import random
from typing import Any

import jsonschema
import pytest

from scorepool.engine import InvalidRequest
from scorepool.engine.text.chat.grammar import Function, StructuredOutputSpec
from tests.chat_formats import EOS, chat_codec_of, compile_constraint, generation_prompt_of, ids_of
from tests.engine.text.chat.test_grammar_compiler import ids_in

NOT_JSON = [
    "qwen3_coder",
    "seed_oss",
    "minimax_m2",
    "glm47",
    "longcat",
    "deepseek_v32",
    "hy_v3",
    "solar_open2",
    "step3",
]
NESTED = ["olmo3", "minimax_m3", "gemma4", "function_gemma", "lfm2", "llama4_pythonic", "pythonic"]
ADDRESS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 3}, "zip": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"address": ADDRESS},
    "properties": {
        "text": {"type": "string", "minLength": 1, "maxLength": 4},
        "unit": {"enum": ["C", "F, or K"]},
        "code": {"type": "string", "pattern": "^[a-c]{2}$"},
        "day": {"type": "string", "format": "date"},
        "either": {
            "anyOf": [
                {"type": "boolean"},
                {"type": "string", "maxLength": 3},
                {"type": "array", "items": {}, "maxItems": 0},
            ]
        },
        "number": {"type": "number", "minimum": 0, "maximum": 10},
        "sure": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "address": {"$ref": "#/$defs/address"},
        "tags": {"type": "array", "items": {"enum": ["x", "y", 5]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["text", "unit", "sure", "tags"],
    "additionalProperties": False,
}
LETTERS = set(b"aZ7'\"\\,.-:{}[]()<>/| \n") | set("ü".encode())


def walk(name: str, schema: dict[str, Any], seed: int) -> list[Any]:
    """Generate at random what the grammar allows, and return the calls that are read from it."""
    chat = chat_codec_of(name)
    spec = StructuredOutputSpec(functions=[Function(name="look", parameters=schema, strict=True)], must_call=True)
    prompt = generation_prompt_of(name)
    constraint, parser = compile_constraint(chat, spec, prompt), chat.output_parser(prompt)
    rng, generated, eos = random.Random(seed), list[int](), ids_of(name, EOS)[0]
    while generated[-1:] != [eos]:
        allowed = ids_in(constraint.token_bitmask(generated))
        assert constraint.error is None
        assert len(generated) < 5000, chat.tokenizer.decode(generated)
        plain = [i for i in allowed if i >= 256 or set(chat.tokenizer.token_bytes(i)) <= LETTERS]
        usual = plain if rng.random() < 0.95 else sorted(allowed)
        endings = [i for i in allowed if i >= 256]  # not to stay in a string for long
        if eos in allowed and rng.random() < 0.7:
            endings = plain = [eos]
        generated.append(rng.choice(endings if endings and rng.random() < 0.3 else sorted(usual or allowed)))
        parser.read(generated[-1])
    parser.end()
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    assert parser.spans, chat.tokenizer.decode(generated)
    calls = [chat.parse_tool_calls(span, generated, [tool]) for span in parser.spans]
    assert all(calls), chat.tokenizer.decode(generated)
    assert "content" not in parser.channels, chat.tokenizer.decode(generated)
    return [json.loads(call.arguments) for each in calls for call in each]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [*NOT_JSON, *NESTED])
def test_whatever_the_grammar_allows_is_a_call_whose_arguments_are_valid(name: str, seed: int):
    for arguments in walk(name, SCHEMA, seed):
        jsonschema.validate(arguments, SCHEMA, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("name", [*NOT_JSON, *NESTED])
def test_a_function_without_arguments_is_called_without(name: str):
    assert walk(name, {"type": "object", "properties": {}, "additionalProperties": False}, 0)[0] == {}


@pytest.mark.parametrize("name", [*NOT_JSON, *NESTED])
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "foo"}, "Invalid type: foo"),
        ({"type": "string", "format": "nope"}, "Unknown format: nope"),
        ({"type": "string", "pattern": "(?=a)b"}, ""),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "minLength": "x"}, ""),
        ({"type": "string", "minLength": 3, "maxLength": 2}, ""),
        ({"type": "string", "pattern": 5}, ""),
        ({"type": "array", "items": {"type": "string"}, "minItems": "x"}, ""),
        ({"type": ["string", "null"], "contentEncoding": "base64"}, "contentEncoding"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"$ref": "#/$defs/nope"}, "leads nowhere"),
        ({"$ref": "#/properties/a"}, "lead back to themselves"),
    ],
)
def test_what_a_grammar_cannot_follow_is_refused_with_the_functions_name(
    name: str, schema: dict[str, Any], reason: str
):
    function = Function(name="fly", parameters={"properties": {"a": schema}}, strict=True)
    with pytest.raises(InvalidRequest, match=f"^the parameters of 'fly': .*{reason}"):
        compile_constraint(chat_codec_of(name), StructuredOutputSpec(functions=[function]), generation_prompt_of(name))


@pytest.mark.parametrize("name", [*NOT_JSON, *NESTED])
def test_references_that_double_cost_nothing(name: str):
    """2**40 choices, if each were followed."""
    definitions = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    parameters = {
        "properties": {"a": {"$ref": "#/$defs/d0"}},
        "$defs": definitions | {"d40": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
        "required": ["a"],
    }
    function = Function(name="look", parameters=parameters)
    spec = StructuredOutputSpec(functions=[function], must_call=True)
    assert compile_constraint(chat_codec_of(name), spec, generation_prompt_of(name)).token_bitmask([])


LONG = "hellö </p>\n<|x\n\n"
AROUND = {  # the text before and after a string
    "qwen3_coder": ("<tool_call>\n<function=look>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>"),
    "minimax_m2": ('<minimax:tool_call>\n<invoke name="look">\n<parameter name="a">', "</parameter>\n</invoke>\n"),
    "glm47": ("<tool_call>look<arg_key>a</arg_key><arg_value>", "</arg_value></tool_call>"),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="a" string="true">',
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    "gemma4": ('<|tool_call>call:look{a:<|"|>', '<|"|>}<tool_call|>'),
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"maxLength": 100},
        {"maxLength": 10_000},
        {"minLength": 1},
        {"minLength": 3, "maxLength": 2000},
        {"pattern": "l"},
    ],
)
@pytest.mark.parametrize("others", [[], ["null"], ["null", "integer", "boolean"]])
def test_strings_of_any_length_end_where_their_tag_does(name: str, limits: dict[str, Any], others: list[str]):
    """Grammars that look right can fail at the end of a long string, or know no end at all."""
    choices = [{"type": "string", **limits}, *({"type": each} for each in others)]
    parameters = {"properties": {"a": {"anyOf": choices}}, "required": ["a"]}
    spec = StructuredOutputSpec(
        functions=[Function(name="look", parameters=parameters, strict=True)], must_call=True, parallel_calls=False
    )
    before, after = AROUND[name]
    after += "" if name != "minimax_m2" else "</minimax:tool_call>"
    prompt = generation_prompt_of(name)
    constraint = compile_constraint(chat_codec_of(name), spec, prompt)
    long = LONG * (min(limits.get("maxLength", 2000), 2000) // len(LONG))
    texts = [f"hel{LONG}", long, *(["null"] if others else []), *(["12", "true"] if "integer" in others else [])]
    for text in texts:
        token_ids = ids_of(name, before + text + after)
        constraint = constraint.restarted()
        for end in range(0, len(token_ids), 7):
            constraint.token_bitmask(token_ids[:end])
        assert ids_in(constraint.token_bitmask(token_ids)) == {ids_of(name, EOS)[0]}, (text[:20], constraint.error)
