"""A constrained sequence is JSON of its schema and nothing else; its logprobs are the model's own."""

import functools
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from scorepool.engine import ChatCodec, Engine, InvalidRequest, Sampling, Sequence, Tokenizer
from scorepool.engine.text.chat.grammar import StructuredOutputSpec
from tests.chat_formats import chat_codec_of, compile_constraint, ids_of
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_tokenizer import EOS, build_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["fox", "dog"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["kind", "count", "names"],
    "additionalProperties": False,
}


def sequence_of(engine: Engine, seed: int, schema: dict[str, Any] | None = SCHEMA, **options: Any) -> Sequence:
    constraint = None
    if schema is not None:
        constraint = compile_constraint(engine.chat, StructuredOutputSpec(json_schema=schema), None)
    sampling = Sampling(max_tokens=120, seed=seed, **options)
    return Sequence(token_ids=[0, 50, 51], top_logprobs=2, sampling=sampling, constraint=constraint)


def text_of(sequence: Sequence) -> str:
    assert sequence.text_bytes is not None
    return sequence.text_bytes.decode()


def follows_schema(sequence: Sequence) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text_of(sequence)))


def test_constrained_sequences_run_beside_free_ones(engine: Engine, oracle: Oracle):
    constrained = [sequence_of(engine, seed) for seed in range(5)]
    free = [sequence_of(engine, seed, schema=None) for seed in range(2)]

    engine.add([*constrained, *free]).result(60)

    for sequence in constrained:
        assert sequence.finish_reason == "stop"
        assert follows_schema(sequence)
        assert_agrees(sequence, oracle)
    assert len({text_of(sequence) for sequence in constrained}) > 1
    alone = sequence_of(engine, 0, schema=None)
    engine.add([alone]).result(60)
    assert alone.token_ids == free[0].token_ids  # constraints beside it change nothing


@pytest.mark.parametrize("settings", [{"mode": "exact"}, {"max_running_rows": 1}])
def test_constraints_hold_in_every_mode(engine_of: Callable[..., Engine], settings: dict[str, Any]):
    engine = engine_of("llama", **settings)
    sequences = [sequence_of(engine, seed) for seed in range(2)]

    engine.add(sequences).result(60)

    assert [text_of(sequence) for sequence in sequences if not follows_schema(sequence)] == []


def test_a_greedy_or_penalized_sequence_is_constrained_too(engine: Engine):
    sequences = [
        sequence_of(engine, 1, temperature=0),
        sequence_of(engine, 2, top_k=3, frequency_penalty=1.0),
    ]

    engine.add(sequences).result(60)

    assert [text_of(sequence) for sequence in sequences if not follows_schema(sequence)] == []


def test_the_same_seed_generates_the_same_tokens(engine: Engine):
    first, repeated = sequence_of(engine, 3), sequence_of(engine, 3)
    engine.add([first]).result(60)
    engine.add([repeated, *[sequence_of(engine, seed) for seed in range(4, 7)]]).result(60)

    assert first.token_ids == repeated.token_ids


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "foo"},
        {"$ref": "http://example.com/a"},
        {"type": "string", "format": "nope"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        functools.reduce(lambda inner, _: {"items": inner}, range(900), {}),
        {"properties": {f"p{index}": {} for index in range(20_000)}},
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(schema: dict[str, Any]):
    chat = ChatCodec(Tokenizer(build_tokenizer(), [EOS]))

    with pytest.raises(InvalidRequest, match=r"^.{1,400}$"):
        compile_constraint(chat, StructuredOutputSpec(json_schema=schema), None)


def test_an_end_token_that_the_tokenizer_lacks_does_not_keep_the_others_from_ending_an_answer():
    chat = ChatCodec(Tokenizer(build_tokenizer(), [EOS, 9999]))
    digits, _ = chat.tokenizer.encode("7", add_bos=False)
    constraint = compile_constraint(chat, StructuredOutputSpec(json_schema={"type": "integer"}), None)

    allowed = ids_in(constraint.token_bitmask(digits))

    assert EOS in allowed
    assert constraint.error is None


@pytest.mark.parametrize("eos_ids", [[], [9999]])
def test_without_an_end_token_in_the_tokenizer_nothing_is_constrained(eos_ids: list[int]):
    chat = ChatCodec(Tokenizer(build_tokenizer(), eos_ids))

    with pytest.raises(InvalidRequest, match="it needs an end token, and the model has none that its tokenizer knows"):
        compile_constraint(chat, StructuredOutputSpec(json_schema={"type": "integer"}), None)


def ids_in(bitmask: bytes) -> set[int]:
    return {token_id for token_id in range(len(bitmask) * 8) if bitmask[token_id // 8] >> token_id % 8 & 1}


def test_a_token_that_was_not_allowed_ends_the_sequence_with_a_reason():
    chat = chat_codec_of("json_tools")
    constraint = compile_constraint(chat, StructuredOutputSpec(json_schema={"type": "object"}), None)

    assert ids_in(constraint.token_bitmask(ids_of("json_tools", "x"))) == chat.tokenizer.eos_ids
    assert constraint.error
