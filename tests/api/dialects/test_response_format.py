"""Answers in JSON of a schema with OpenAI's SDK, from a model that was not trained on JSON."""

import json
from typing import Any, Literal

import openai
import pytest
from huggingface_hub import InferenceClient
from openai import OpenAI
from pydantic import BaseModel, Field

from scorepool import Client
from scorepool.local.stack import Stack


class Answer(BaseModel, extra="forbid"):
    kind: Literal["file", "folder"]
    depth: int = Field(ge=0, le=9)


ASKED: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "What does os.listdir do?"}]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": Answer.model_json_schema()}}


def test_the_sdk_parses_an_answer_into_its_class(sdk: OpenAI):
    completion = sdk.chat.completions.parse(**ASKED, response_format=Answer, seed=1)

    assert isinstance(completion.choices[0].message.parsed, Answer)


def test_hugging_faces_client_gets_an_answer_of_its_schema(stack: Stack):
    with InferenceClient(base_url=stack.url, api_key="unused", timeout=60) as hub:
        answer = hub.chat_completion(**ASKED, response_format=SCHEMA, seed=1)  # type: ignore[arg-type]

    content = answer.choices[0].message.content
    assert content is not None
    Answer.model_validate_json(content)


def test_logprobs_are_those_of_the_model_before_the_constraint(sdk: OpenAI, stack: Stack):
    asked = ASKED | {"seed": 2, "logprobs": True, "extra_body": {"return_token_ids": True}}
    completion = sdk.chat.completions.create(**asked, response_format=SCHEMA)

    (choice,) = completion.choices
    Answer.model_validate_json(choice.message.content)
    assert len(choice.logprobs.content) == completion.usage.completion_tokens
    with Client(stack.url) as native:
        (scored,) = native.score("demo", [(completion.prompt_token_ids, choice.token_ids)]).sequences
    found = [entry.logprob for entry in choice.logprobs.content]
    assert found == pytest.approx(scored.logprobs.values(), abs=1e-4)
    assert min(found) < -5  # the model alone would not write JSON


@pytest.mark.parametrize("form", [SCHEMA, {"type": "json_object"}])
def test_a_streamed_answer_equals_the_whole_one(sdk: OpenAI, form: dict[str, Any]):
    asked = ASKED | {"response_format": form, "seed": 3, "max_tokens": 40}
    whole = sdk.chat.completions.create(**asked).choices[0].message.content

    chunks = list(sdk.chat.completions.create(**asked, stream=True))

    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole
    assert whole.startswith("{")


def test_concurrent_answers_follow_their_own_schemas(sdk: OpenAI):
    completion = sdk.chat.completions.create(**ASKED, response_format=SCHEMA, n=4, seed=4)

    for choice in completion.choices:
        assert json.loads(choice.message.content).keys() == {"kind", "depth"}


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "foo"}}}, "response_format"),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 10**20}}},
            "response_format.json_schema",
        ),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_object", "value": {"const": 10**20}}, "response_format"),
        ({"type": "json_object", "value": "a"}, "response_format.value"),
        ({"type": "json_object", "schema": {}}, "response_format.schema"),
    ],
)
def test_an_invalid_schema_is_refused_by_name(sdk: OpenAI, form: dict[str, Any], param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(**ASKED, response_format=form)

    assert caught.value.param == param
    assert caught.value.body["message"].startswith(f"{param}: ")
