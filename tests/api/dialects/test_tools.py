"""Tools, reasoning and their logprobs with OpenAI's SDK, from a scripted model."""

import json
import warnings
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion

from scorepool import Client
from scorepool.local.stack import Stack
from tests.scripted_model import CALL, REASONING

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from its imports
    from trl.generation import vllm_client

CHANNELS = ["reasoning"] * 2 + ["markup"] + ["content"] * 3 + ["markup"] + ["tool_call"] * 2 + ["markup"] * 2
MESSAGES = [{"role": "user", "content": "Is it in <think>Zürich</think>?"}]
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


@pytest.fixture
def sdk(scripted: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{scripted.url}/v1", api_key="unused", max_retries=0) as sdk:
        yield sdk


def chat(sdk: OpenAI, **options: Any) -> ChatCompletion:
    asked = {"model": "m", "messages": MESSAGES, "temperature": 0, "tools": [LOOK], "logprobs": True, "top_logprobs": 2}
    return sdk.chat.completions.create(**asked | options)


def test_a_call_with_its_reasoning_and_its_logprobs(sdk: OpenAI):
    completion = chat(sdk)

    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "".join(REASONING)
    assert choice.message.content == "One moment ä"
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "look")
    assert json.loads(call.function.arguments) == {"place": "Zürich"}
    entries = choice.logprobs.content
    assert len(entries) == completion.usage.completion_tokens == len(CHANNELS)
    assert completion.usage.completion_tokens_details.reasoning_tokens == len(REASONING)
    assert [entry.channel for entry in entries] == CHANNELS
    assert [entry.token for entry in entries[:3]] == [*REASONING, "</think>"]
    assert b"".join(bytes(entry.bytes) for entry in entries if entry.channel == "content") == "One moment ä".encode()
    assert all(len(entry.top_logprobs) == 2 and entry.logprob == entry.top_logprobs[0].logprob for entry in entries)


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"max_tokens": 8}, {"tool_choice": "none"}, {"stop": "Z"}])
def test_a_stream_with_tools_equals_the_whole_answer(sdk: OpenAI, options: dict[str, Any]):
    whole = chat(sdk, **options)

    chunks = list(chat(sdk, **options, stream=True, stream_options={"include_usage": True}))

    details = chunks[-1].usage.completion_tokens_details
    assert details == whole.usage.completion_tokens_details
    assert details.reasoning_tokens == len(REASONING) * len(whole.choices)
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        deltas = [part.delta for part in parts]
        assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")
        reasoning = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
        assert reasoning == choice.message.reasoning_content
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert [call.model_dump(exclude={"index"}) for call in calls] == [
            call.model_dump() for call in choice.message.tool_calls or ()
        ]
        assert parts[-1].finish_reason == choice.finish_reason
        found = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
        assert [(entry.token, entry.channel, entry.bytes) for entry in found] == [
            (entry.token, entry.channel, entry.bytes) for entry in choice.logprobs.content
        ]
        assert [entry.logprob for entry in found] == pytest.approx([entry.logprob for entry in choice.logprobs.content])


def test_the_sdks_own_stream_accumulates_the_call(sdk: OpenAI):
    asked: dict[str, Any] = {"model": "m", "messages": MESSAGES, "temperature": 0, "tools": [LOOK]}
    with sdk.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()

    message = final.choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"place": "Zürich"}
    assert final.choices[0].finish_reason == "tool_calls"
    said = {"role": "tool", "tool_call_id": call.id, "content": "It is."}
    assert chat(sdk, messages=[*MESSAGES, message, said], max_tokens=1).choices  # with the fields that the SDK adds


@pytest.mark.parametrize("as_dict", [False, True])  # with its null fields
def test_an_answer_and_its_tools_output_are_accepted_in_the_chat(sdk: OpenAI, scripted: Stack, as_dict: bool):
    message = chat(sdk).choices[0].message
    (call,) = message.tool_calls
    said = {"role": "tool", "tool_call_id": call.id, "content": "It is."}
    answered = message.model_dump() if as_dict else message

    again = chat(sdk, messages=[*MESSAGES, answered, said], max_tokens=1, extra_body={"return_token_ids": True})

    with Client(scripted.url) as native:
        ids = native.score("m", [(again.prompt_token_ids, again.choices[0].token_ids)], score="all")
    prompt = b"".join(ids.sequences[0].token_bytes).decode()
    assert "<think>Where is it? I look.</think>One moment ä<tool_call>look place=Zürich</tool_call>" in prompt
    assert "<|im_start|>tool\nIt is.<|im_end|>\n<|im_start|>assistant\n<think>" in prompt
    assert again.choices[0].message.reasoning_content == REASONING[0]


def test_tool_choice_none_shows_tools_and_calls_none(sdk: OpenAI):
    asked = {"extra_body": {"return_token_ids": True}}

    none, auto = chat(sdk, tool_choice="none", **asked), chat(sdk, tool_choice="auto", **asked)

    assert none.prompt_token_ids == auto.prompt_token_ids
    assert none.choices[0].message.tool_calls is None
    assert none.choices[0].message.content == "One moment ä" + "".join(CALL)
    assert none.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("tool_choice", ["none", "auto"])
def test_a_rendered_chat_shows_the_tools_that_the_chat_shows(sdk: OpenAI, scripted: Stack, tool_choice: str):
    asked = {"model": "m", "messages": MESSAGES, "tools": [LOOK], "tool_choice": tool_choice}

    rendered = httpx.post(f"{scripted.url}/v1/chat/completions/render", json=asked, timeout=60).json()

    answered = chat(sdk, tool_choice=tool_choice, extra_body={"return_token_ids": True})
    assert rendered["token_ids"] == answered.prompt_token_ids


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
        ({"tools": [LOOK | {"function": LOOK["function"] | {"strict": True}}]}, "tools"),
    ],
)
def test_a_rendered_chat_that_would_constrain_its_calls_is_refused(
    scripted: Stack, options: dict[str, Any], field: str
):
    asked = {"model": "m", "messages": MESSAGES, "tools": [LOOK]} | options
    reply = httpx.post(f"{scripted.url}/v1/chat/completions/render", json=asked, timeout=60)
    assert (reply.status_code, reply.json()["error"]["field"]) == (400, field), reply.text


def test_trls_client_shows_its_tools(sdk: OpenAI, scripted: Stack, monkeypatch: pytest.MonkeyPatch):
    """The client sends `tool_choice` none and parses calls from the tokens itself."""
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_, **__: True)
    trl = vllm_client.VLLMClient(base_url=scripted.url)
    options: dict[str, Any] = {"tools": [LOOK], "temperature": 0.0, "max_tokens": 20}

    found = trl.chat([MESSAGES], **options, chat_template_kwargs={"enable_thinking": False})

    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    asked = chat(sdk, extra_body={"return_token_ids": True} | thinking)
    assert found["prompt_ids"] == [asked.prompt_token_ids]
    assert found["completion_ids"] == [asked.choices[0].token_ids]


def test_the_template_gets_the_variables_that_it_reads(sdk: OpenAI, scripted: Stack):
    asked = {"extra_body": {"return_token_ids": True, "chat_template_kwargs": {"enable_thinking": False}}}

    answer = chat(sdk, reasoning_effort="low", **asked)

    (choice,) = answer.choices
    assert not hasattr(choice.message, "reasoning_content")
    assert (choice.message.content, choice.finish_reason) == ("One moment ä", "tool_calls")
    prompt = httpx.post(f"{scripted.url}/detokenize", json={"tokens": answer.prompt_token_ids}).json()["prompt"]
    assert prompt.endswith("<|im_start|>assistant\nEffort: low\n<think></think>")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["enabel_thinking", "messages", "tools", "chat_template", "eos_token"])
def test_a_variable_that_the_template_does_not_read_is_refused_by_name(sdk: OpenAI, name: str, stream: bool):
    with pytest.raises(openai.APIError) as caught:
        list(chat(sdk, extra_body={"chat_template_kwargs": {name: True}}, stream=stream))

    assert caught.value.body["param"] == f"chat_template_kwargs.{name}"
    assert name in caught.value.message


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "look"}}}, "tool_choice.type"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "look"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"reasoning_effort": "most"}, "reasoning_effort"),
        (
            {"reasoning_effort": "low", "extra_body": {"chat_template_kwargs": {"reasoning_effort": "high"}}},
            "reasoning_effort",
        ),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": [1]}}}, "chat_template_kwargs[...]"),
        ({"extra_body": {"chat_template_kwargs": {str(i): i for i in range(17)}}}, "chat_template_kwargs"),
        ({"functions": [{"name": "look"}]}, "functions"),
    ],
)
def test_unsupported_values_are_refused_by_name(sdk: OpenAI, options: dict[str, Any], param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(sdk, **options)

    assert caught.value.param == param
    assert param.split(".")[-1].split("[")[0] in caught.value.message


def test_reasoning_before_a_constrained_answer_is_free(sdk: OpenAI):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["Zürich", "Bern"]}}}

    completion = chat(sdk, tools=openai.omit, response_format=form)

    (choice,) = completion.choices
    assert choice.message.reasoning_content == "".join(REASONING)
    assert json.loads(choice.message.content) in ("Zürich", "Bern")
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.content) == completion.usage.completion_tokens
