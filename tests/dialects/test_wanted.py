"""An answer that is wanted to be calls, or JSON, is, whatever a model would say: here it says anything allowed."""

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wire
from api.openai.chat import ChatChoice, ChatRequest, to_chat_completion, to_request
from engine import Tokenizer
from engine.stop import end_if_done
from tests.chat_formats import TOOLS, ids_of, tokenizer_of
from tests.dialects.test_channels import STAMP
from worker.report import to_result
from worker.translate import to_rows

CALLING = ["json_tools", "opened", "mistral", "mistral_list", "kimi_k2", "harmony"]
NAMES = ["look", "count_up", "look.up"]


def allowed_ids(mask: bytes) -> list[int]:
    number = int.from_bytes(mask, "little")
    return [place for place in range(number.bit_length()) if number >> place & 1]


class Answer:
    """Of a model that takes any allowed token, and says `says` where nothing keeps it from it."""

    def __init__(self, name: str, seed: int, says: str = "", max_tokens: int = 2000, **body: Any) -> None:
        asked = {"model": "m", "messages": [{"role": "user", "content": "Go."}], "logprobs": True, "tools": TOOLS}
        self.body = wire.parse(json.dumps(asked | {"max_tokens": max_tokens} | body).encode(), ChatRequest)
        tokenizer = tokenizer_of(name)
        request = to_request(self.body, timeout_s=60)
        (translated,) = to_rows(request, tokenizer, context_length=10_000)
        self.row = translated.row
        self._generate(tokenizer, random.Random(seed), ids_of(name, says))
        result = to_result(request, [translated], tokenizer, STAMP)
        self.choice: ChatChoice = to_chat_completion(self.body, result, "id").choices[0]

    def _generate(self, tokenizer: Tokenizer, any_of: random.Random, says: list[int]) -> None:
        row = self.row
        assert row.constraint is not None
        while not row.is_done:
            may = allowed_ids(row.constraint.allowed(row.token_ids[row.num_given :]))
            likes = says[row.num_generated : row.num_generated + 1]
            marks = [token_id for token_id in may if token_id in tokenizer.eos_ids | tokenizer.markup.marker_ids]
            if likes and likes[0] in may:
                token_id = likes[0]
            else:  # a text of any characters hardly ever ends
                token_id = any_of.choice(marks if marks and any_of.random() < 0.3 else may)
            row.token_ids.append(token_id)
            row.logprobs.append(-1.0)
            row.sampled_logprobs.append(-1.0)
            end_if_done(row, tokenizer.token_bytes, tokenizer.eos_ids)


def function(name: str, parameters: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **options}}


def an_object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


VALUES: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.one_of(
        st.just({"type": "boolean"}),
        st.just({"$ref": "#/$defs/kind"}),
        st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
        st.builds(
            lambda least, more: {"type": "integer", "minimum": least, "maximum": least + more},
            st.integers(-99, 99),
            st.integers(0, 500),
        ),
        st.just({"type": "number", "minimum": 0, "maximum": 1}),
        st.just({"type": ["string", "null"], "enum": ["a", "</tool_call>", '"}', None]}),
    ),
    lambda inner: st.one_of(
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.dictionaries(st.sampled_from(["x", "y z", "ü\n"]), inner, max_size=3).map(
            lambda all_: an_object(all_, sorted(all_)[:1])
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda any_: {"anyOf": any_}),
    ),
    max_leaves=4,
)
PARAMETERS = (
    st.dictionaries(st.sampled_from(["a", "b c", "name", "arguments", "{"]), VALUES, max_size=3)
    .flatmap(
        lambda all_: (
            st.lists(st.sampled_from(sorted(all_)), unique=True, max_size=3).map(lambda some: an_object(all_, some))
            if all_
            else st.just(an_object({}, []))
        )
    )
    .map(lambda schema: schema | {"$defs": {"kind": {"enum": ["fox", "dog"]}}})
)


@settings(max_examples=25, deadline=None)
@given(
    parameters=st.lists(PARAMETERS, min_size=1, max_size=2),
    seed=st.integers(0, 2**32),
    choice=st.sampled_from(["required", "named", "auto"]),
    several=st.booleans(),
)
@pytest.mark.parametrize("name", CALLING)
def test_what_is_called_is_a_function_that_may_be_with_arguments_of_its_schema(
    name: str, parameters: list[dict[str, Any]], seed: int, choice: str, several: bool
):
    schemas = dict(zip(NAMES, parameters, strict=False))
    wanted = {"type": "function", "function": {"name": "look"}} if choice == "named" else choice

    answer = Answer(
        name,
        seed,
        tools=[function(one, schema, strict=True) for one, schema in schemas.items()],
        tool_choice=wanted,
        parallel_tool_calls=several,
    )

    choice_ = answer.choice
    calls = choice_.message.tool_calls or []
    if answer.row.finish_reason == "length":
        return
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
    assert choice == "auto" or calls
    assert several or len(calls) <= 1
