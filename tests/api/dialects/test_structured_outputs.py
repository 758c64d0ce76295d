"""Constrained answers follow their schema for a model that samples any allowed token."""

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scorepool import wire
from scorepool.api.dialects.openai.chat import ChatRequest, to_request
from scorepool.api.dialects.openai.chat_reply import ChatChoice, to_chat_completion
from scorepool.engine import ChatCodec
from scorepool.engine.sampling.stop import check_stop
from scorepool.worker.inference.result import to_result
from scorepool.worker.inference.translate import to_sequences
from scorepool.worker.rq.errors import JobError
from tests.answered_chat import PROVENANCE
from tests.chat_formats import EOS, FORMATS, OPENED_FORMATS, TOOLS, chat_codec_of, ids_of
from tests.worker.fake import finish

NOT_CONSTRAINED = ["kimi_k3", "muse_spark"]  # their calls
CALLING = [name for name in FORMATS if name not in NOT_CONSTRAINED]
OPENED = sorted(OPENED_FORMATS)  # their calls stand at the beginning of an answer
PYTHONIC = ["lfm2", "llama4_pythonic", "pythonic"]


def allowed_ids(mask: bytes) -> list[int]:
    number = int.from_bytes(mask, "little")
    return [place for place in range(number.bit_length()) if number >> place & 1]


class Answer:
    """The answer of a model that samples any allowed token, and the text `says` where that is allowed."""

    def __init__(self, name: str, seed: int, says: str = "", max_tokens: int = 2000, **body: Any) -> None:
        asked = {"model": "m", "messages": [{"role": "user", "content": "Go."}], "logprobs": True, "tools": TOOLS}
        self.body = wire.parse(json.dumps(asked | {"max_tokens": max_tokens} | body).encode(), ChatRequest)
        codec = chat_codec_of(name)
        request = to_request(self.body, timeout_s=60)
        (prepared,) = finish(to_sequences(request, codec, context_length=10_000))
        self.row = prepared.sequence
        self._generate(codec, random.Random(seed), ids_of(name, says))
        result = to_result(request, [prepared], codec, PROVENANCE)
        self.choice: ChatChoice = to_chat_completion(self.body, result, "id", 0).choices[0]

    def _generate(self, codec: ChatCodec, any_of: random.Random, says: list[int]) -> None:
        row = self.row
        assert row.constraint is not None
        tokenizer = codec.tokenizer
        while not row.is_done:
            may = allowed_ids(row.constraint.token_bitmask(row.token_ids[row.num_input_tokens :]))
            likes = says[row.num_generated : row.num_generated + 1]
            marks = [token_id for token_id in may if token_id in tokenizer.eos_ids | codec.chat_format.marker_ids]
            if likes and likes[0] in may:
                token_id = likes[0]
            else:  # random characters rarely end a text
                token_id = any_of.choice(marks if marks and any_of.random() < 0.3 else may)
            row.token_ids.append(token_id)
            row.columns.logprobs.append(-1.0)
            row.columns.sampled_logprobs.append(-1.0)
            check_stop(row, tokenizer.token_bytes, tokenizer.eos_ids)


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


LOOK = function("look", an_object({"place": {"enum": ["Bern"]}}, ["place"]))
STRICT = function("look", an_object({"place": {"enum": ["Bern"]}}, ["place"]), strict=True)
NAMED = {"type": "function", "function": {"name": "look"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["Bern", "Basel"]}}}


@settings(max_examples=10)
@given(
    parameters=st.lists(PARAMETERS, min_size=1, max_size=2),
    seed=st.integers(0, 2**32),
    choice=st.sampled_from(["required", NAMED, "auto"]),
    several=st.booleans(),
)
@pytest.mark.parametrize("name", [*CALLING, *OPENED])
def test_constrained_calls_follow_their_schema(
    name: str, parameters: list[dict[str, Any]], seed: int, choice: Any, several: bool
):
    schemas = dict(zip(["look", "count_up"], parameters, strict=False))
    tools = [function(one, schema, strict=True) for one, schema in schemas.items()]
    callable_ = parameters[:1] if choice == NAMED else parameters
    if name in PYTHONIC and not all(key.isidentifier() for schema in callable_ for key in schema["properties"]):
        with pytest.raises(JobError, match="names in Python"):
            Answer(name, seed, tools=tools, tool_choice=choice, parallel_tool_calls=several)
        return

    answer = Answer(name, seed, tools=tools, tool_choice=choice, parallel_tool_calls=several)

    if answer.row.finish_reason == "length":  # some end their reasoning late
        return
    calls = answer.choice.message.tool_calls or []
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
    if choice != "auto":
        assert calls
        assert answer.choice.message.content is None
    if choice == NAMED:
        assert [call.function.name for call in calls] == ["look"]
    assert several or len(calls) <= 1


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("options", [{"tools": [STRICT]}, {"parallel_tool_calls": False}, {"tool_choice": ALLOWED}])
def test_content_before_a_call_is_free(name: str, options: dict[str, Any]):
    """The model alone would write other arguments."""
    form = FORMATS[name]
    before = "Hm.".join(form.reasoning) if form.reasoning[1] else ""
    before += "I look. ä".join(form.content)

    answer = Answer(name, 1, says=before + form.look, **{"tools": [LOOK]} | options)

    message = answer.choice.message
    assert message.content == "I look. ä"
    assert message.tool_calls
    assert all(json.loads(call.function.arguments) == {"place": "Bern"} for call in message.tool_calls)
    assert answer.choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("name", OPENED)
def test_an_answer_is_free_unless_it_begins_as_a_call(name: str):
    text = "I look: <{ ä"
    free = Answer(name, 1, says=text + EOS, tools=[STRICT]).choice.message
    assert free.content == text
    assert not free.tool_calls
    calling = Answer(name, 1, says=OPENED_FORMATS[name].look, tools=[STRICT]).choice.message
    assert calling.tool_calls
    assert all(json.loads(call.function.arguments) == {"place": "Bern"} for call in calling.tool_calls)


@pytest.mark.parametrize("name", CALLING)
def test_content_of_a_schema_may_be_a_call_instead(name: str):
    form = FORMATS[name]
    before = "Hm.".join(form.reasoning) if form.reasoning[1] else ""
    says = [*[""] * 5, before + form.look, before + form.content[0] + '"Bern"']
    asked = {"tools": [LOOK], "response_format": SCHEMA}
    answers = [Answer(name, seed, text, **asked).choice.message for seed, text in enumerate(says)]

    for message in answers:
        calls = [json.loads(call.function.arguments) for call in message.tool_calls or ()]
        assert all(arguments == {"place": "Bern"} for arguments in calls)
        assert (message.content is None) if calls else (json.loads(message.content or "") in ("Bern", "Basel"))
    assert answers[-1].content == '"Bern"'
    assert answers[-2].tool_calls


@pytest.mark.parametrize("name", NOT_CONSTRAINED)
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": ALLOWED}, "allowed_tools"),
        ({"tools": [STRICT]}, "tools"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"response_format": SCHEMA}, "json_schema"),
    ],
)
def test_formats_without_constrained_calls_refuse_the_field_by_name(name: str, options: dict[str, Any], field: str):
    with pytest.raises(JobError) as caught:
        Answer(name, 0, **{"tools": [LOOK]} | options)

    failure = caught.value.failure
    assert (failure.code, failure.field) == ("invalid", field)
    assert failure.message.startswith(f"{field}: ")


@pytest.mark.parametrize("options", [{"min_tokens": 5}, {"ignore_eos": True}])
def test_a_grammar_excludes_ignore_eos_and_min_tokens(options: dict[str, Any]):
    with pytest.raises(JobError, match="`ignore_eos` nor `min_tokens`") as caught:
        Answer("json_tools", 0, tools=[STRICT], **options)

    assert caught.value.failure.field == "tools"


@pytest.mark.parametrize("options", [{}, {"tool_choice": "none", "tools": [STRICT]}, {"tools": None}])
def test_unconstrained_requests_have_no_constraint(options: dict[str, Any]):
    body = {"model": "m", "messages": [{"role": "user", "content": "Go."}], "tools": TOOLS} | options
    request = to_request(wire.parse(json.dumps(body).encode(), ChatRequest), timeout_s=60)

    (prepared,) = finish(to_sequences(request, chat_codec_of("json_tools"), context_length=10_000))

    assert prepared.sequence.constraint is None
