"""A constrained row writes JSON of its schema and nothing else; its logprobs are the model's own."""

import functools
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from scorepool.engine import Engine, InvalidRequest, Sampling, Sequence, Tokenizer
from scorepool.engine.text.chat.constraint import Constrainer
from scorepool.engine.text.chat.grammar import StructuredOutputSpec
from tests.chat_formats import ids_of, tokenizer_of
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_models import EOS, build_tokenizer

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


def row_of(engine: Engine, seed: int, schema: dict[str, Any] | None = SCHEMA, **options: Any) -> Sequence:
    constraint = None if schema is None else engine.tokenizer.constraint(StructuredOutputSpec(json_schema=schema), None)
    sampling = Sampling(max_tokens=120, seed=seed, **options)
    return Sequence(token_ids=[0, 50, 51], top_logprobs=2, sampling=sampling, constraint=constraint)


def text_of(row: Sequence) -> str:
    assert row.text_bytes is not None
    return row.text_bytes.decode()


def test_rows_write_json_of_the_schema_beside_rows_that_are_free(engine: Engine, oracle: Oracle):
    rows = [row_of(engine, seed) for seed in range(5)]
    free = [row_of(engine, seed, schema=None) for seed in range(2)]

    engine.add([*rows, *free]).result(60)

    for row in rows:
        assert row.finish_reason == "stop"
        jsonschema.validate(json.loads(text_of(row)), SCHEMA)
        assert_agrees(row, oracle)
    assert len({text_of(row) for row in rows}) > 1
    alone = row_of(engine, 0, schema=None)
    engine.add([alone]).result(60)
    assert alone.token_ids == free[0].token_ids  # who is not constrained notices nothing


@pytest.mark.parametrize("settings", [{"mode": "exact"}, {"max_running_rows": 1}])
def test_however_rows_are_run(engine_of: Callable[..., Engine], settings: dict[str, Any]):
    engine = engine_of("llama", **settings)
    rows = [row_of(engine, seed) for seed in range(2)]

    engine.add(rows).result(60)

    for row in rows:
        jsonschema.validate(json.loads(text_of(row)), SCHEMA)


def test_a_greedy_or_penalized_row_is_constrained_too(engine: Engine):
    rows = [row_of(engine, 1, temperature=0), row_of(engine, 2, top_k=3, frequency_penalty=1.0)]

    engine.add(rows).result(60)

    for row in rows:
        jsonschema.validate(json.loads(text_of(row)), SCHEMA)


def test_the_same_seed_writes_the_same(engine: Engine):
    first, again = row_of(engine, 3), row_of(engine, 3)
    engine.add([first]).result(60)
    engine.add([again, *[row_of(engine, seed) for seed in range(4, 7)]]).result(60)

    assert first.token_ids == again.token_ids


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "foo"},
        {"$ref": "http://example.com/a"},
        {"type": "string", "format": "nope"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        functools.reduce(lambda inner, _: {"items": inner}, range(900), {}),
        {"properties": {f"p{place}": {} for place in range(20_000)}},
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(schema: dict[str, Any]):
    tokenizer = Tokenizer(build_tokenizer(), [EOS], constrainer=Constrainer)

    with pytest.raises(InvalidRequest, match=r"^.{1,400}$"):
        tokenizer.constraint(StructuredOutputSpec(json_schema=schema), None)


def bits(mask: bytes) -> set[int]:
    return {place for place in range(len(mask) * 8) if mask[place // 8] >> place % 8 & 1}


def test_a_token_that_was_not_allowed_ends_the_row_with_a_reason():
    tokenizer = tokenizer_of("json_tools")
    constraint = tokenizer.constraint(StructuredOutputSpec(json_schema={"type": "object"}), None)

    assert bits(constraint.token_bitmask(ids_of("json_tools", "x"))) == tokenizer.eos_ids
    assert constraint.error
