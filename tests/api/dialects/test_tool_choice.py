"""Required and named tools are called, with OpenAI's SDK and a scripted model that may leave its script."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field

from scorepool import Client
from scorepool.local.stack import Stack
from tests.scripted_model import REASONING


class Look(BaseModel):
    """Look somewhere."""

    place: Literal["Bern", "Basel"]
    days: int = Field(ge=0, le=9)


class Near(BaseModel):
    place: Literal["Bern"]


class Count(BaseModel):
    names: list[Literal["fox", "dog"]] = Field(max_length=2)


TOOLS = [pydantic_function_tool(Look, name="look"), pydantic_function_tool(Count, name="count_up")]
NAMED = {"type": "function", "function": {"name": "look"}}
ONLY_COUNT = [{"type": "function", "function": {"name": "count_up"}}]
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Go."}], "tools": TOOLS, "seed": 1}


@pytest.fixture
def sdk(scripted: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{scripted.url}/v1", api_key="unused", max_retries=0) as sdk:
        yield sdk


def chat(sdk: OpenAI, **options: Any) -> ChatCompletion:
    return sdk.chat.completions.create(**ASKED | {"temperature": 0.2} | options)


def test_the_sdk_parses_calls_into_their_classes(sdk: OpenAI):
    completion = sdk.chat.completions.parse(**ASKED, tool_choice="required", temperature=0.2, n=4)

    for choice in completion.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.reasoning_content == "".join(REASONING)
        assert choice.message.content is None
        assert choice.message.tool_calls
        for call in choice.message.tool_calls:
            expected = {"look": Look, "count_up": Count}[call.function.name]
            assert isinstance(call.function.parsed_arguments, expected)


def test_a_named_function_is_called_once_with_the_models_own_logprobs(sdk: OpenAI, scripted: Stack):
    asked = {"logprobs": True, "top_logprobs": 2, "extra_body": {"return_token_ids": True}}

    completion = chat(sdk, tool_choice=NAMED, **asked)

    (choice,) = completion.choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "look"
    Look.model_validate_json(call.function.arguments)
    assert choice.finish_reason == "stop"  # as from OpenAI and vLLM
    entries = choice.logprobs.content
    assert len(entries) == completion.usage.completion_tokens
    assert [entry.channel for entry in entries[:4]] == ["reasoning", "reasoning", "markup", "markup"]
    assert {entry.channel for entry in entries[4:-2]} == {"tool_call"}
    with Client(scripted.url) as native:
        (scored,) = native.score("m", [(completion.prompt_token_ids, choice.token_ids)]).sequences
    found = [entry.logprob for entry in entries]
    assert found == pytest.approx(scored.logprobs.values(), abs=1e-4)
    assert min(found) < -5  # logprobs before the constraint: the script is far more likely


def test_parallel_tool_calls_false_allows_one_call(sdk: OpenAI):
    def asked(parallel: bool, **options: Any) -> Any:
        asked = {"tool_choice": "required", "max_tokens": 250, "extra_body": {"return_token_ids": True}}
        return chat(sdk, parallel_tool_calls=parallel, **asked, **options).choices[0]

    end = asked(parallel=True).token_ids[-1]
    goes_on = {"logit_bias": {end: -100}}

    assert len(asked(parallel=True, **goes_on).message.tool_calls) > 1
    assert len(asked(parallel=False, **goes_on).message.tool_calls) == 1


def test_a_strict_tool_constrains_the_call_and_not_the_content(sdk: OpenAI):
    """The script looks in Zürich."""
    (choice,) = chat(sdk, tools=[pydantic_function_tool(Near, name="look")], temperature=0).choices

    assert choice.message.reasoning_content == "".join(REASONING)
    assert choice.message.content == "One moment ä"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"place": "Bern"}
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called(sdk: OpenAI, mode: str):
    """The other tools are shown to the model."""
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": ONLY_COUNT}}
    asked = {"temperature": 0, "extra_body": {"return_token_ids": True}}

    completion = chat(sdk, tool_choice=allowed, **asked)

    assert completion.choices[0].message.tool_calls
    assert {call.function.name for call in completion.choices[0].message.tool_calls} == {"count_up"}
    assert completion.prompt_token_ids == chat(sdk, tool_choice="none", **asked).prompt_token_ids


def test_a_json_answer_may_be_a_call_instead(sdk: OpenAI):
    completion = sdk.chat.completions.parse(**ASKED, response_format=Near, temperature=0.2, n=8)

    messages = [choice.message for choice in completion.choices]
    assert all(message.tool_calls or isinstance(message.parsed, Near) for message in messages)
    assert {bool(message.tool_calls) for message in messages} == {True, False}


@pytest.mark.parametrize(
    "options",
    [{"tool_choice": "required"}, {"tool_choice": NAMED, "n": 2}, {}, {"tool_choice": "required", "max_tokens": 12}],
)
def test_a_stream_of_calls_equals_the_whole_answer(sdk: OpenAI, options: dict[str, Any]):
    whole = chat(sdk, logprobs=True, **options)

    chunks = list(chat(sdk, logprobs=True, **options, stream=True))

    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        calls = [call for part in parts for call in part.delta.tool_calls or ()]
        expected = [call.model_dump() for call in choice.message.tool_calls or ()]
        assert [call.model_dump(exclude={"index"}) for call in calls] == expected
        assert "".join(part.delta.content or "" for part in parts) == (choice.message.content or "")
        assert parts[-1].finish_reason == choice.finish_reason
        found = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
        assert [(entry.token, entry.channel) for entry in found] == [
            (entry.token, entry.channel) for entry in choice.logprobs.content
        ]


def test_a_cut_off_call_is_no_call(sdk: OpenAI):
    (choice,) = chat(sdk, tool_choice="required", max_tokens=12).choices

    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    with pytest.raises(openai.LengthFinishReasonError):
        sdk.chat.completions.parse(**ASKED, tool_choice="required", max_tokens=12)


def test_unconstrained_requests_beside_constrained_ones_are_unchanged(sdk: OpenAI):
    def ask(number: int) -> ChatCompletion:
        if number % 2:
            return chat(sdk, tool_choice=NAMED, seed=number)
        return chat(sdk, tools=openai.omit, temperature=0)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))

    for number, answer in enumerate(answers):
        message = answer.choices[0].message
        if number % 2:
            Look.model_validate_json(message.tool_calls[0].function.arguments)
        else:
            assert message.content == 'One moment ä{"name": "look", "arguments": {"place": "Zürich"}}'


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"properties": {"a": {"type": "foo"}}}, "tools: the parameters of 'fly': .*Invalid type: foo"),
        ({"type": "array"}, "tools: the parameters of 'fly': expected a schema of objects"),
        ({"properties": {"a": {"type": "string", "pattern": "^a(b"}}}, r"parse error: unclosed group: \^a\(b"),
        ({"properties": {"a": {"type": "string", "pattern": "(?!\n)b"}}}, "parse error: look-around.* supported: "),
        ({"properties": {"a": {"oneOf": [{}, {"type": "null"}]}}}, "oneOf whose choices may overlap: use anyOf"),
    ],
)
def test_an_unsupported_schema_is_refused_with_its_reason(sdk: OpenAI, parameters: Any, why: str):
    fly = {"type": "function", "function": {"name": "fly", "strict": True, "parameters": parameters}}

    with pytest.raises(openai.BadRequestError, match=why) as caught:
        chat(sdk, tools=[*TOOLS, fly])

    assert caught.value.param == "tools"


def test_unsupported_parts_of_a_tool_that_is_not_strict_are_ignored(sdk: OpenAI):
    """Pydantic writes such schemas for sets, paths and tagged unions; its clients do not send `strict`."""
    either = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    properties = {"a": {"enum": [1], "format": "path"}, "b": {"type": "array", "maxItems": 0, "uniqueItems": True}}
    parameters = {"properties": properties | {"c": either}, "required": ["a", "b", "c"]}
    parameters |= {"additionalProperties": False, "$defs": {"a": {"const": 2}, "b": {"const": 2}}}
    function = {"name": "look", "parameters": parameters}

    (choice,) = chat(sdk, tools=[{"type": "function", "function": function}], tool_choice="required").choices

    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 1, "b": [], "c": 2}
